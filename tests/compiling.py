"""How quickly what is tested is compiled, in this process and in those that tests start.

Compiling is what most tests wait for. Where they ask what a program means, XLA's costly
optimizations are left out, and the emitters of fusions that it has now: those which they replaced
compile a small program in a fifth of the time. JAX 0.10 has both.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax._src import compiler

_OLD_EMITTERS = jax.__version_info__ < (0, 11)
_OPTIONS = {"xla_cpu_use_fusion_emitters": False} if _OLD_EMITTERS else {}
_FLAGS = [f"--{name}={str(value).lower()}" for name, value in _OPTIONS.items()]


@contextmanager
def quickly() -> Iterator[None]:
    """Compiles quickly, here and in the processes that are started meanwhile."""
    usual = compiler.get_compile_options

    def options(**given: Any) -> Any:
        given["env_options_overrides"] = _OPTIONS | (given.get("env_options_overrides") or {})
        return usual(**given)

    before = jax.config.read("jax_disable_most_optimizations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", options)
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
        patch.setenv("XLA_FLAGS", " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS]))
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", before)

"""How quickly what is tested is compiled, in this process and in those that tests start.

Compiling is what most tests wait for. Where they ask what a program means, XLA's costly
optimizations are left out, and the emitters of fusions that it has now: those which they replaced
compile a small program in a fifth of the time. JAX 0.10 has both. And what one test compiled is
not compiled for another: a third of what they ask for differs in the names of lines alone.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax._src import compiler

_OLD_EMITTERS = jax.__version_info__ < (0, 11)
_OPTIONS = {"xla_cpu_use_fusion_emitters": False} if _OLD_EMITTERS else {}
_MOST_KEPT = 4000  # executables
_FLAGS = [f"--{name}={str(value).lower()}" for name, value in _OPTIONS.items()]


class _Compiled:
    """Executables by what they were compiled of, lines of source aside."""

    def __init__(self) -> None:
        self._compile = compiler.backend_compile_and_load
        self._kept: dict[bytes, Any] = {}

    def backend_compile_and_load(
        self, backend: Any, module: Any, devices: Any, options: Any, callbacks: Any
    ) -> Any:
        """Does what JAX's function does, once for each program; one that calls back is compiled."""
        if callbacks:
            return self._compile(backend, module, devices, options, callbacks)
        text = module.operation.get_asm(enable_debug_info=False)
        key = hashlib.sha256(text.encode() + options.SerializeAsString()).digest()
        if key not in self._kept:
            if len(self._kept) == _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = self._compile(backend, module, devices, options, callbacks)
        return self._kept[key]


_COMPILED = _Compiled()


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
        patch.setattr(compiler, "backend_compile_and_load", _COMPILED.backend_compile_and_load)
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
        patch.setenv("XLA_FLAGS", " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS]))
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", before)

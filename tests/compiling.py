"""Fast compilation for tests, in this process and in those that they start.

Most tests spend their time compiling. Tests of a program's meaning leave out XLA's costly
optimizations and its new fusion emitters: the old emitters compile a small program in a fifth of
the time. JAX 0.10 has both. Executables are also shared between tests: a third of all compilations
differ only in source lines.
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
    """Executables by the module they were compiled from, without source lines."""

    def __init__(self) -> None:
        self._compile = compiler.backend_compile_and_load
        self._kept: dict[bytes, Any] = {}

    def backend_compile_and_load(
        self, backend: Any, module: Any, devices: Any, options: Any, callbacks: Any
    ) -> Any:
        """Compiles each program once; programs with callbacks are always compiled."""
        if callbacks:
            return self._compile(backend, module, devices, options, callbacks)
        text = module.operation.get_asm(enable_debug_info=False)
        key = hashlib.sha256(text.encode() + options.SerializeAsString()).digest()
        if key not in self._kept:
            if len(self._kept) == _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = self._compile(backend, module, devices, options, callbacks)
        return self._kept[key]

    def forget(self) -> None:
        self._kept.clear()


_COMPILED = _Compiled()


def forget_compiled() -> None:
    """Drops all executables, so that the next test compiles its own."""
    _COMPILED.forget()


@contextmanager
def quickly() -> Iterator[None]:
    """Compiles quickly, here and in processes started meanwhile."""
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

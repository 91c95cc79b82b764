"""A test compiles as it is marked, whatever tests compiled before it in the same process.

The tests run in this order: within a file, optimized ones are last.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src import compiler

from tests.compiling import quickly
from tests.shared_zoo import built_zoo


def softmax(x: jax.Array) -> jax.Array:
    return jnp.exp(x) / jnp.sum(jnp.exp(x), axis=1, keepdims=True)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that are compiled, by any means, during the test."""
    found: list[str] = []
    usual = compiler.backend_compile_and_load

    def compile_noted(backend: Any, module: Any, *more: Any) -> Any:
        found.append(str(module.operation.attributes["sym_name"]))
        return usual(backend, module, *more)

    monkeypatch.setattr(compiler, "backend_compile_and_load", compile_noted)
    return found


def test_a_test_of_meaning_compiles_a_function_once(compiled: list[str]) -> None:
    x = jnp.ones((8, 8))
    jax.jit(softmax)(x)
    jax.jit(softmax)(x)
    assert compiled.count('"jit_softmax"') == 1


@pytest.mark.optimized
def test_an_optimized_test_does_not_run_what_a_quick_one_compiled(compiled: list[str]) -> None:
    jax.jit(softmax)(jnp.ones((8, 8)))
    assert compiled.count('"jit_softmax"') == 1


@pytest.mark.grid
@pytest.mark.optimized
def test_a_program_of_the_zoo_is_built_as_the_test_compiles() -> None:
    with quickly():
        quick = built_zoo("nnx")
    assert built_zoo("nnx") is not quick

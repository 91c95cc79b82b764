"""Sub-jaxprs, loops and sources of equations."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from jaxfleet.ops import jax_adapter

ONES = jnp.ones((3, 3))


def equations(function: Any, *args: Any) -> list[Any]:
    return list(jax.make_jaxpr(function)(*args).eqns)


@jax.custom_jvp
def softened(x: Any) -> Any:
    return jnp.tanh(x)


@softened.defjvp
def softened_jvp(primals: Any, tangents: Any) -> Any:
    return softened(*primals), tangents[0]


@pytest.mark.parametrize("function", [jax.jit(jnp.sin), softened], ids=["jit", "custom_jvp"])
def test_a_wrapper_gives_all_its_inputs_to_what_it_wraps(function: Any) -> None:
    (eqn,) = equations(function, ONES)
    call = jax_adapter.call_of(eqn)
    assert call is not None
    assert list(call.inputs) == [0]
    assert len(jax_adapter.open_jaxpr(call.body)[0].eqns) == 1


def test_a_linear_solve_is_what_its_solver_does() -> None:
    def function(matrix: Any, x: Any) -> Any:
        def times(v: Any) -> Any:
            return matrix @ v

        return lax.custom_linear_solve(times, x, lambda _, b: b / 2, symmetric=True)

    eqn = next(e for e in equations(function, ONES, ONES) if "solve" in e.primitive.name)
    call = jax_adapter.call_of(eqn)
    assert call is not None
    (solve,) = jax_adapter.open_jaxpr(call.body)[0].eqns
    assert solve.primitive.name == "div"
    assert eqn.invars[call.inputs[-1]].aval.shape == (3, 3)


def test_what_computes_by_itself_wraps_nothing() -> None:
    (eqn,) = equations(lax.sin, ONES)
    assert jax_adapter.call_of(eqn) is None


def test_a_scan_divides_its_operands() -> None:
    def function(scale: Any, start: Any, rows: Any) -> Any:
        return lax.scan(lambda c, row: (c * scale + row, None), start, rows)[0]

    (eqn,) = equations(function, 2.0, jnp.ones(3), ONES)
    assert jax_adapter.loop_of(eqn) == jax_adapter.Loop(num_consts=1, num_carry=1)


def test_a_source_is_the_innermost_line_outside_libraries() -> None:
    eqns = equations(lambda x: optax.l2_loss(2 * x), ONES)
    source = jax_adapter.source_of(eqns[-1])
    assert Path(source.file).name == "test_jaxprs.py"
    assert "optax.l2_loss(2 * x)" in source.where()


@pytest.mark.parametrize(
    ("stack", "scope"),
    [
        ("", ""),
        ("CNN/Conv_0", "CNN/Conv_0"),
        ("transpose(jvp(CNN))/Conv_0", "CNN/Conv_0"),
        ("jvp()", ""),
        ("vmap(transpose(jvp(Net/Dense_0)))", "Net/Dense_0"),
    ],
)
def test_a_scope_is_a_name_stack_without_transformations(stack: str, scope: str) -> None:
    assert jax_adapter.clean_scope(stack) == scope


def test_functions_of_libraries_are_told_from_the_users() -> None:
    (own,) = equations(jax.jit(lambda x: x + 1), ONES)
    (library,) = equations(jax.nn.relu, ONES)
    assert not jax_adapter.is_library_function(own.params["jaxpr"])
    call = jax_adapter.call_of(library)
    assert call is not None
    assert jax_adapter.is_library_function(call.body)

"""Constants, literals, weak types, random keys and wide types are preserved."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.ir import Kind, Literal, Program
from tests.capture.common import assert_same_as_the_step, op_types

BATCH = np.ones((4, 3), np.float32)
ONE = jnp.float32(1)


def captured(step: Any, state: Any = ONE, batch: Any = BATCH) -> Program:
    return assert_same_as_the_step(step, state, batch).program


def literals(program: Program) -> set[str]:
    ops = [op for block in program.blocks for op in block.ops]
    return {str(x) for op in ops for x in op.inputs if isinstance(x, Literal)}


def test_an_array_from_outside_is_a_constant_and_equal_ones_are_one() -> None:
    first, second = np.arange(12, dtype=np.float32), np.arange(12, dtype=np.float32)

    def step(state: Any, batch: Any) -> Any:
        return state, (batch.sum() * first).sum() + jnp.dot(second, first)

    constants = captured(step).of_kind(Kind.CONST)
    assert [(constant.name, constant.type) for constant in constants] == [("const.0", "f32[12]")]


def test_a_constant_that_nothing_reads_is_left_out() -> None:
    def step(state: Any, batch: Any) -> Any:
        _ = jnp.asarray(np.arange(12.0, dtype=np.float32)) * batch.sum()
        return state, batch.sum()

    assert captured(step).of_kind(Kind.CONST) == ()


@pytest.mark.parametrize("number", [0.1, -0.0, float("inf"), float("nan"), 3, True])
def test_a_number_from_outside_is_a_literal(number: Any) -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, jnp.where(batch > 0, number, batch)

    assert op_types(captured(step)).count("jax.select_n") == 1


def test_a_number_keeps_the_dtype_of_what_it_meets() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, (batch * 2, batch.astype(jnp.bfloat16) * 2, (batch > 0) * 3)

    assert {"2.0:f32", "2.0:bf16"} <= literals(captured(step))


def test_a_python_number_in_the_state_stays_weak() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, batch.astype(jnp.bfloat16) * state["rate"]

    program = captured(step, {"rate": 0.5})
    metrics = next(op for op in program.root.ops if "metrics" in op.writes)
    assert program.lookup(metrics.writes[0]).dtype == "bf16"


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys_are_carried_in_the_state(impl: str) -> None:
    def step(state: Any, batch: Any) -> Any:
        key, now = jax.random.split(state)
        return key, batch * jax.random.bernoulli(now, 0.5, batch.shape)

    key = jax.random.key(3, impl=impl)
    program = captured(step, key)
    assert program.variables["state"].dtype == key.dtype.name


def test_a_random_key_may_be_made_in_the_step_and_come_from_outside() -> None:
    outside = jax.random.key(5)

    def step(state: Any, batch: Any) -> Any:
        inside = jax.random.key(6)
        return state, (jax.random.normal(outside), jax.random.normal(inside, (2,)))

    captured(step)


def test_old_keys_are_plain_integers() -> None:
    def step(state: Any, batch: Any) -> Any:
        key, now = jax.random.split(state)
        return key, batch + jax.random.normal(now, batch.shape)

    assert captured(step, jax.random.PRNGKey(0)).variables["state"].type == "u32[2]"


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "float16", "bfloat16"])
def test_a_batch_of_any_dtype(dtype: str) -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, (batch, batch.astype(jnp.float32).mean())

    captured(step, batch=np.ones((4, 3)).astype(jnp.dtype(dtype)))


def test_complex_state() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state * (batch.sum() + 2j), jnp.abs(state)

    captured(step, jnp.complex64(1 + 1j))


def test_with_x64_wide_types_stay_wide() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state + batch.mean(), {"count": jnp.int64(batch.size)}

    with jax.enable_x64(True):
        wide = jf.capture(step, example=(np.float64(1), BATCH.astype(np.float64)))
        assert wide.program.variables["batch"].type == "f64[b,3]"
        assert wide.notes == ()

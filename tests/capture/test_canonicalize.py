"""Programs that jax writes differently with a letter are canonicalized to those with a number."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import jaxfleet as jf
from jaxfleet.capture.signature import Signature
from jaxfleet.capture.trace import trace
from jaxfleet.ir import Program
from tests.capture.common import assert_same_as_the_step, op_types

STATE = jnp.ones(())
ROWS = 6
BATCH = np.arange(ROWS * 20, dtype=np.float32).reshape(ROWS, 4, 5)


def both(index: Callable[[Any], Any]) -> tuple[Program, Program]:
    """Returns a step that indexes the batch, with a letter and with a number."""

    def step(state: Any, batch: Any) -> Any:
        slope = jax.grad(lambda x: jnp.square(index(x)).sum())(batch)
        return state, {"part": index(batch), "slope": slope}

    signature = Signature.of(STATE, BATCH)
    lettered, numbered = (
        trace(step, signature, rows=rows, name="step").program for rows in (None, ROWS)
    )
    assert_same_as_the_step(step, STATE, BATCH)
    return lettered, numbered


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "index",
    [
        lambda x: x[:, 0],
        lambda x: x[:, -1],
        lambda x: x[:, 1:],
        lambda x: x[:, :-1],
        lambda x: x[:, 1:3, ::2],
        lambda x: x[:, 1, 2:],
        lambda x: x[..., 0],
        lambda x: x[:, :, 3],
        lambda x: x[:, None, 1],
        lambda x: x[:, ::2],
        lambda x: x[:, 1::2],
        lambda x: x[:, ::-1],
        lambda x: x[1:],
        lambda x: x[:-1],
        lambda x: x[1:] * x[:-1],
        lambda x: x[0],
        lambda x: x[-1],
        lambda x: x[-1, 2],
        lambda x: x[1:, 0],
        lambda x: x[:, :],
        lambda x: x[:, 2:3],
        lambda x: jnp.split(x, 2, axis=1)[0],
        lambda x: jax.lax.dynamic_slice_in_dim(x, 1, 2, axis=1),
    ],
)
def test_a_part_is_a_slice_with_a_letter_as_with_a_number(index: Callable[[Any], Any]) -> None:
    lettered, numbered = both(index)
    assert op_types(lettered) == op_types(numbered)
    assert not {"jax.gather", "jax.scatter-add", "jax.dynamic_slice"} & set(op_types(lettered))


cuts = st.one_of(
    st.integers(-4, 3),
    st.builds(
        slice,
        st.none() | st.integers(-4, 3),
        st.none() | st.integers(-4, 4),
        st.none() | st.integers(1, 3),
    ),
)


@given(first=cuts, second=cuts)
def test_any_part_of_a_row_reads_alike(first: Any, second: Any) -> None:
    assume(BATCH[:, first, second].size)
    signature = Signature.of(STATE, BATCH)

    def step(state: Any, batch: Any) -> Any:
        return state, batch[:, first, second]

    lettered, numbered = (trace(step, signature, rows=n, name="s").program for n in (None, ROWS))
    assert op_types(lettered) == op_types(numbered)


def test_a_row_that_may_not_be_there_is_still_looked_up() -> None:
    lettered = jf.capture(lambda state, batch: (state, batch[3]), example=(STATE, BATCH)).program
    assert "jax.dynamic_slice" in op_types(lettered)
    assert_same_as_the_step(lambda state, batch: (state, batch[3]), STATE, BATCH)


def test_a_gather_at_indices_that_are_not_known_stays() -> None:
    def step(state: Any, batch: Any) -> Any:
        order = batch[:, 0, 0].argsort()
        return state, batch[order]

    captured = assert_same_as_the_step(step, STATE, BATCH)
    assert "jax.gather" in op_types(captured.program)


def test_a_range_over_the_rows_is_one_iota() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, jnp.arange(batch.shape[0])

    captured = assert_same_as_the_step(step, STATE, BATCH)
    assert op_types(captured.program) == ["jax.iota", "fetch"]


def test_arithmetic_on_known_integers_leaves_nothing_behind() -> None:
    def step(state: Any, batch: Any) -> Any:
        three = jnp.int32(1) + 2
        return state, jnp.where(three < 2, batch.max(), batch.min())

    captured = assert_same_as_the_step(step, STATE, BATCH)
    assert op_types(captured.program) == ["jax.reduce_min", "fetch"]


def test_integers_that_wrap_around_are_left_to_jax() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, (jnp.uint32(2**31) * 2 + 1, jnp.int8(127) + jnp.int8(1))

    assert_same_as_the_step(step, STATE, BATCH)


def test_a_size_is_computed_at_once() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, batch.sum() / (2 * batch.shape[0] - 1)

    program = jf.capture(step, example=(STATE, BATCH)).program
    assert "{dim=<2*b-1>, dtype=i32}" in str(program)


def test_what_nothing_reads_is_left_out_with_its_blocks() -> None:
    def step(state: Any, batch: Any) -> Any:
        jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), batch)
        kept = jax.lax.scan(lambda x, _: (jnp.cos(x), None), batch, None, length=2)[0]
        return state, kept

    captured = assert_same_as_the_step(step, STATE, BATCH)
    assert op_types(captured.program) == ["jax.scan", "fetch", "jax.cos"]
    assert len(captured.program.blocks) == 2

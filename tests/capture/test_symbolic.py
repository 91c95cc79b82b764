"""The batch is a letter if that is sound, otherwise a number, with a note."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.ir import Dim
from tests.capture.common import bits, replay

STATE = jnp.ones((3,))


def rows(count: int) -> np.ndarray[Any, Any]:
    return np.arange(3 * count, dtype=np.float32).reshape(count, 3)


def capture(step: Any, count: int = 4) -> jf.Captured:
    return jf.capture(step, example=(STATE, rows(count)))


def test_one_capture_serves_every_batch_size() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, {"mean": (batch * state).mean(), "rows": batch @ state}

    captured = capture(step)
    assert captured.rows is None
    assert captured.at(9) is captured
    assert captured.program.variables["batch"].type == "f32[b,3]"
    for count in (2, 4, 9):
        wanted, found = jax.jit(step)(STATE, rows(count)), replay(captured, STATE, rows(count))
        assert list(map(bits, jax.tree.leaves(wanted))) == list(map(bits, jax.tree.leaves(found)))


def even(state: Any, batch: Any) -> Any:
    value = (batch * state).mean()
    if batch.shape[0] % 2 == 0:
        value = 2.0 * value  # for even sizes
    return state, value


def odd(state: Any, batch: Any) -> Any:
    value = (batch * state).mean()
    if batch.shape[0] % 2:
        value = 2.0 * value  # for odd sizes
    return state, value


@pytest.mark.parametrize("step", [even, odd])
def test_a_branch_on_the_size_is_found_whichever_side_the_example_is_on(step: Any) -> None:
    captured = capture(step)
    assert captured.rows == 4
    (note,) = captured.notes
    assert "captured for each batch size: " in note
    assert "value = 2.0 * value" in note
    assert "capture/test_symbolic.py" in note
    for count in (4, 5):
        assert bits(jax.jit(step)(STATE, rows(count))[1]) == bits(
            replay(captured.at(count), STATE, rows(count))[1]
        )


def test_a_capture_for_one_size_is_made_once_for_every_other() -> None:
    captured = capture(even)
    assert captured.at(4) is captured
    assert captured.at(6).rows == 6
    assert captured.at(6) is captured.at(6)
    assert captured.at(6).at(4) is captured
    assert captured.at(6).signature.rows == 6
    assert captured.at(6).program.variables["batch"].type == "f32[6,3]"


def reshaped(state: Any, batch: Any) -> Any:
    return state, batch.reshape(2, -1).sum(axis=0)


def as_number(state: Any, batch: Any) -> Any:
    return state, batch.sum() / float(len(batch))


def compared(state: Any, batch: Any) -> Any:
    return state, batch.sum() * (2.0 if batch.shape[0] > 3 else 1.0)


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (reshaped, "batch.reshape(2, -1)"),
        (as_number, "float(len(batch))"),
        (compared, "if batch.shape[0] > 3"),
    ],
)
def test_what_cannot_be_traced_with_a_letter_is_captured_by_size_with_the_line(
    step: Any, code: str
) -> None:
    captured = capture(step)
    assert captured.rows == 4
    assert code in captured.notes[0]
    assert bits(jax.jit(step)(STATE, rows(4))[1]) == bits(replay(captured, STATE, rows(4))[1])


@pytest.mark.parametrize(
    ("step", "instead"),
    [
        (reshaped, "x.reshape(n, x.shape[0] // n, ...) instead of a size of -1"),
        (as_number, "jnp.mean for a sum over float(len(x))"),
        (compared, "do not compare the number of rows in Python"),
    ],
)
def test_the_reason_for_one_size_says_what_to_write_to_keep_any(step: Any, instead: str) -> None:
    _, _, advice = capture(step).notes[0].partition("; to keep any size, ")
    assert instead in advice


def test_a_size_that_the_step_refuses_is_refused_in_its_own_words() -> None:
    captured = capture(reshaped)
    with pytest.raises(TypeError, match="cannot reshape"):
        captured.at(1)


def test_a_step_that_wants_an_even_batch_keeps_its_letter() -> None:
    def step(state: Any, batch: Any) -> Any:
        if isinstance(batch.shape[0], int) and batch.shape[0] % 2:
            raise ValueError("an even batch, please")
        return state, (batch * state).mean()

    assert capture(step).rows is None
    with pytest.raises(ValueError, match="an even batch, please"):
        capture(step, 5)


def test_programs_that_are_built_otherwise_but_compute_the_same_keep_the_letter() -> None:
    def step(state: Any, batch: Any) -> Any:
        count = batch.shape[0]
        total = batch.sum(axis=0) if isinstance(count, int) else jnp.ones(count) @ batch
        return state + total, {}

    assert capture(step).rows is None


def test_an_example_of_one_row_keeps_its_letter() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, (batch * state).mean()

    assert capture(step, 1).rows is None


def test_a_size_that_is_computed_with_is_kept_as_a_size() -> None:
    def step(state: Any, batch: Any) -> Any:
        pairs = batch[1:] - batch[:-1]
        return state, pairs.sum() / pairs.shape[0]

    program = capture(step).program
    dims = [op.attrs["dim"] for op in program.root.ops if op.type == "jax.dim_value"]
    assert [str(dim) for dim in dims if isinstance(dim, Dim)] == ["b-1"]

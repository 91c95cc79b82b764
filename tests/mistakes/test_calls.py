"""Mistakes when a distributed step is called: another batch, another state, a donated state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import CaptureError, FeedError
from tests.mistakes.common import ROWS, State, batch, params, refused, training, wrapped

DEVICES = 4
STRUCTURE = "the batch has another structure than the example"


def distributed() -> tuple[jf.Step, State]:
    step, state = training(wrapped())
    strategy = jf.DistributedStrategy(devices=DEVICES)
    found = jf.distribute(step, example=(state, batch()), strategy=strategy)
    assert isinstance(found, jf.Step)
    return found, state


@pytest.fixture(scope="module")
def step_and_state() -> tuple[jf.Step[Any, Any], State]:
    """Returns a distributed step and its state, for calls that are rejected."""
    return distributed()


def test_an_example_whose_rows_the_devices_cannot_share() -> None:
    step, state = training(wrapped())
    with refused(
        FeedError,
        cause="a batch of 6 rows cannot be divided among 4 devices",
        line="jf.distribute(step, (state, batch(6))",
        hint="use a multiple of 4, such as 4 or 8",
    ):
        jf.distribute(step, (state, batch(6)), jf.DistributedStrategy(devices=DEVICES))


BATCHES: dict[str, tuple[Any, str, str]] = {
    "rows that the devices cannot share": (
        batch(6),
        "a batch of 6 rows cannot be divided among 4 devices",
        "use a multiple of 4, such as 4 or 8",
    ),
    "fewer rows than devices": (
        batch(2),
        "a batch of 2 rows cannot be divided among 4 devices",
        "use a multiple of 4, such as 4",
    ),
    "no rows": (batch(0), "the batch has no rows", "leave out a step"),
    "a tuple": (tuple(batch().values()), STRUCTURE, "x"),
    "a leaf less": ({"x": batch()["x"]}, STRUCTURE, "x"),
    "a leaf more": ({**batch(), "z": batch()["x"]}, STRUCTURE, "x"),
    "None": (None, STRUCTURE, "x"),
    **{
        f"a leaf of {np.dtype(dtype)}": (
            {**batch(), "x": batch()["x"].astype(dtype)},
            "but it is f32[b,4]",
            "convert it to f32 before the step",
        )
        for dtype in (np.float16, np.int32, np.bool_)
    },
    **{
        f"a leaf of shape {shape}": (
            {**batch(), "x": np.ones(shape, np.float32)},
            f"'batch/x' has shape {list(shape)}, in the example [8, 4]",
            "only the number of rows may change",
        )
        for shape in ((ROWS, 3), (ROWS,), (ROWS, 4, 1))
    },
}
"""Batches unlike the example: the cause and the hint of the error that refuses each."""


@pytest.mark.parametrize(("other", "cause", "hint"), BATCHES.values(), ids=BATCHES)
def test_a_batch_unlike_the_example(
    step_and_state: tuple[jf.Step[Any, Any], State], other: Any, cause: str, hint: str
) -> None:
    step, state = step_and_state
    with refused(FeedError, cause=cause, line="step(state, other)", hint=hint):
        step(state, other)


def test_batch_leaves_that_differ_in_their_rows() -> None:
    step, state = distributed()
    with pytest.raises(FeedError, match="differ in their rows: 'batch/x' has 8, 'batch/y' has 4"):
        step(state, {**batch(), "y": batch(4)["y"]})


STATES: dict[str, tuple[Callable[[State], Any], str, str]] = {
    "a leaf more": (
        lambda state: {**state, "extra": jnp.zeros(2)},
        "the state has another structure than the example",
        "distribute the step again",
    ),
    "another optimizer's": (
        lambda state: {**state, "opt_state": optax.adam(0.1).init(params())},
        "the state has another structure than the example",
        "distribute the step again",
    ),
    "a part": (
        lambda state: state["params"],
        "the state has another structure than the example",
        "distribute the step again",
    ),
    "a leaf of bf16": (
        lambda state: {
            **state,
            "params": jax.tree.map(lambda x: x.astype(jnp.bfloat16), params()),
        },
        "'params/b' is fed bf16, but it is f32[2]",
        "convert it to f32",
    ),
}
"""States unlike the example: the cause and the hint of the error that refuses each."""


@pytest.mark.parametrize(("change", "cause", "hint"), STATES.values(), ids=STATES)
def test_a_state_unlike_the_example(
    step_and_state: tuple[jf.Step[Any, Any], State],
    change: Callable[[State], Any],
    cause: str,
    hint: str,
) -> None:
    step, state = step_and_state
    other = change(state)
    with refused(FeedError, cause=cause, line="step(other, batch())", hint=hint):
        step(other, batch())


def test_a_state_leaf_of_another_shape() -> None:
    step, state = distributed()
    with pytest.raises(FeedError, match=r"'params/w' .*\[4,3\]"):
        step({**state, "params": {**params(), "w": jnp.ones((4, 3))}}, batch())


def test_a_state_that_was_used_before() -> None:
    step, state = distributed()
    step(state, batch())
    with refused(
        FeedError,
        cause="the state was used before: the last step took its memory",
        line="step(state, batch())",
        hint="state, metrics = step(state, batch)",
    ):
        step(state, batch())


def test_state_and_batch_the_wrong_way_round() -> None:
    step, state = distributed()
    with pytest.raises(FeedError, match="the batch has another structure than the example"):
        step(batch(), state)


def test_a_step_inside_a_traced_function() -> None:
    step, state = distributed()
    with refused(
        FeedError,
        cause="the step is called inside a traced function",
        line="jax.jit(step)(state, batch())",
        hint="call it outside jit",
    ):
        jax.jit(step)(state, batch())


def test_an_example_in_disorder_is_shown_beside_the_steps_own_arguments() -> None:
    def train_step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        return {"w": params["w"] - (x.T @ y)}, opt_state, (x @ params["w"] - y).sum()

    x, y, params = np.ones((8, 3), "f4"), np.ones(8, "f4"), {"w": np.ones(3, "f4")}
    with pytest.raises(TypeError, match="string indexing") as raised:  # what jax raises
        jf.distribute(train_step, (x, y, params, {}), "single")
    text = "\n".join(raised.value.__notes__)
    assert "note: train_step(params, opt_state, x, y) was called with the example's types: " in text
    assert "params: f32[8,3], opt_state: f32[8], x: dict of 1 array, y: dict of 0 arrays" in text
    assert "write example=(params, opt_state, x, y)" in text


def test_a_hint_is_for_code_that_logs_an_error_too() -> None:
    distribute: Any = jf.distribute
    with pytest.raises(CaptureError) as refused:
        distribute(lambda state: state, (1,), "single")
    assert refused.value.hint == "write example=(state, batch), or all arguments in their order"
    assert f"  hint: {refused.value.hint}" in refused.value.__notes__
    assert "hint" not in str(refused.value)

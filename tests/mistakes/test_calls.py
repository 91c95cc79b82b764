"""Mistakes when a distributed step is called: another batch, another state, a state used up."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import FeedError
from tests.mistakes.common import ROWS, State, batch, params, refused, training, wrapped

DEVICES = 4


def distributed() -> tuple[jf.Step, State]:
    step, state = training(wrapped())
    strategy = jf.DistributedStrategy(devices=DEVICES)
    found = jf.distribute(step, example=(state, batch()), strategy=strategy)
    assert isinstance(found, jf.Step)
    return found, state


def test_an_example_whose_rows_the_devices_cannot_share() -> None:
    step, state = training(wrapped())
    with refused(
        FeedError,
        cause="a batch of 6 rows cannot be divided among 4 devices",
        line="jf.distribute(step, (state, batch(6))",
        hint="use a multiple of 4, such as 4 or 8",
    ):
        jf.distribute(step, (state, batch(6)), jf.DistributedStrategy(devices=DEVICES))


def test_a_batch_whose_rows_the_devices_cannot_share() -> None:
    step, state = distributed()
    with refused(
        FeedError,
        cause="a batch of 6 rows cannot be divided among 4 devices",
        line="step(state, batch(6))",
        hint="use a multiple of 4, such as 4 or 8",
    ):
        step(state, batch(6))


@pytest.mark.parametrize(
    "other",
    [tuple(batch().values()), {"x": batch()["x"]}, {**batch(), "z": batch()["x"]}, None],
    ids=["a tuple", "less", "more", "None"],
)
def test_a_batch_of_another_structure(other: Any) -> None:
    step, state = distributed()
    with refused(
        FeedError,
        cause="the batch has another structure than the example",
        line="step(state, other)",
        hint="x",
    ):
        step(state, other)


@pytest.mark.parametrize("dtype", [np.float16, np.int32, np.bool_])
def test_a_batch_leaf_of_another_dtype(dtype: Any) -> None:
    step, state = distributed()
    with refused(
        FeedError,
        cause="but it is f32[b,4]",
        line="step(state, other)",
        hint="convert it to f32 before the step",
    ):
        other = {**batch(), "x": batch()["x"].astype(dtype)}
        step(state, other)


@pytest.mark.parametrize("shape", [(ROWS, 3), (ROWS,), (ROWS, 4, 1)])
def test_a_batch_leaf_of_another_shape(shape: tuple[int, ...]) -> None:
    step, state = distributed()
    with refused(
        FeedError,
        cause=f"'batch/x' has shape {list(shape)}, in the example [8, 4]",
        line="step(state, other)",
        hint="only the number of rows may change",
    ):
        other = {**batch(), "x": np.ones(shape, np.float32)}
        step(state, other)


def test_batch_leaves_that_differ_in_their_rows() -> None:
    step, state = distributed()
    with pytest.raises(FeedError, match="differ in their rows: 'batch/x' has 8, 'batch/y' has 4"):
        step(state, {**batch(), "y": batch(4)["y"]})


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {**state, "extra": jnp.zeros(2)},
        lambda state: {**state, "opt_state": optax.adam(0.1).init(params())},
        lambda state: state["params"],
    ],
    ids=["more", "another optimizer's", "a part"],
)
def test_a_state_of_another_structure(change: Any) -> None:
    step, state = distributed()
    with refused(
        FeedError,
        cause="the state has another structure than the example",
        line="step(other, batch())",
        hint="distribute the step again",
    ):
        other = change(state)
        step(other, batch())


def test_a_state_leaf_of_another_dtype() -> None:
    step, state = distributed()
    with refused(
        FeedError,
        cause="'params/b' is fed bf16, but it is f32[2]",
        line="step(other, batch())",
        hint="convert it to f32",
    ):
        other = {**state, "params": jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())}
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


def test_a_batch_of_fewer_rows_than_devices() -> None:
    step, state = distributed()
    with refused(
        FeedError,
        cause="a batch of 2 rows cannot be divided among 4 devices",
        line="step(state, batch(2))",
        hint="use a multiple of 4, such as 4",
    ):
        step(state, batch(2))


def test_a_batch_without_rows() -> None:
    step, state = distributed()
    with refused(
        FeedError,
        cause="the batch has no rows",
        line="step(state, batch(0))",
        hint="leave out a step",
    ):
        step(state, batch(0))


def test_a_step_inside_a_traced_function() -> None:
    step, state = distributed()
    with refused(
        FeedError,
        cause="the step is called inside a traced function",
        line="jax.jit(step)(state, batch())",
        hint="call it outside jit",
    ):
        jax.jit(step)(state, batch())

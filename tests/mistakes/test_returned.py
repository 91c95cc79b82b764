"""Mistakes with a step's results and arguments."""

from functools import partial
from typing import Any

import jax
import pytest

import jaxfleet as jf
from jaxfleet.errors import CaptureError
from tests.mistakes.common import Batch, State, batch, refused, training, wrapped


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda pair: pair[0], "changed returns a dict"),
        (lambda _: None, "changed returns nothing"),
        (lambda pair: (*pair, 1), "changed returns a tuple of 3"),
        (list, "changed returns a list"),
    ],
    ids=["only the state", "nothing", "three things", "a list"],
)
def test_a_step_that_does_not_return_a_pair(change: Any, said: str) -> None:
    step, state = training(wrapped())

    def changed(state: State, batch: Batch) -> Any:
        return change(step(state, batch))

    with refused(
        CaptureError,
        cause=f"{said}, not (state, metrics)",
        line="def changed(",
        hint="metrics may be an empty dict",
    ):
        jf.capture(changed, example=(state, batch()))


def test_a_pair_the_wrong_way_round() -> None:
    step, state = training(wrapped())

    def swapped(state: State, batch: Batch) -> Any:
        state, metrics = step(state, batch)
        return metrics, state

    with refused(
        CaptureError,
        cause="swapped returns (metrics, state)",
        line="def swapped(",
        hint="return (state, metrics), in this order",
    ):
        jf.capture(swapped, example=(state, batch()))


def test_a_metric_that_is_no_array() -> None:
    step, state = training(wrapped())

    def named(state: State, batch: Batch) -> Any:
        state, metrics = step(state, batch)
        return state, {**metrics, "name": "sgd"}

    with refused(
        CaptureError,
        cause="the metrics leaf 'metrics/name' is of type str",
        line="def named(",
        hint="return arrays as metrics",
    ):
        jf.capture(named, example=(state, batch()))


def test_a_step_of_three_arguments() -> None:
    def step(state: State, batch: Batch, train: bool) -> Any:
        return state, {}

    with refused(
        CaptureError,
        cause="cannot be called as step(state, batch): missing a required argument: 'train'",
        line="def step(state: State, batch: Batch, train: bool)",
        hint="example=(state, batch, train): a random key goes whole to every device",
    ):
        jf.capture(step, example=(training(wrapped())[1], batch()))


def test_a_jitted_step_with_a_static_argument() -> None:
    @partial(jax.jit, static_argnames="train")
    def step(state: State, batch: Batch, train: bool) -> Any:
        return state, {}

    with refused(
        CaptureError,
        cause="missing a required argument: 'train'",
        line="@partial(jax.jit",
        hint="static arguments too",
    ):
        jf.capture(step, example=(training(wrapped())[1], batch()))


def test_a_step_of_one_argument() -> None:
    def step(state: State) -> Any:
        return state, {}

    with refused(
        CaptureError,
        cause="cannot be called as step(state, batch): too many positional arguments",
        line="def step(state: State)",
        hint="functools.partial",
    ):
        jf.capture(step, example=(training(wrapped())[1], batch()))


def test_a_result_in_the_place_of_the_step() -> None:
    step, state = training(wrapped())
    with refused(
        CaptureError,
        cause="the training step is of type tuple, not a function",
        line="jf.capture(step(state, batch())",
        hint="pass the function itself",
    ):
        jf.capture(step(state, batch()), example=(state, batch()))


def test_an_example_that_is_no_pair() -> None:
    step, state = training(wrapped())
    with refused(
        CaptureError,
        cause="the example is a tuple of 1, not a tuple of all the step's arguments",
        line="jf.capture(step, example=(state,))",
        hint="write example=(state, batch)",
    ):
        jf.capture(step, example=(state,))


def test_an_example_that_is_the_batch_is_not_printed() -> None:
    step, _ = training(wrapped())
    with refused(
        CaptureError,
        cause="the example is of type ndarray, not a tuple of all the step's arguments",
        line="jf.capture(step, example=batch()",
        hint="write example=(state, batch)",
    ):
        jf.capture(step, example=batch()["x"])


def test_an_example_of_more_than_the_step_takes() -> None:
    step, state = training(wrapped())
    with refused(
        CaptureError,
        cause="cannot be called with 3 arguments: too many positional arguments",
        line="def step(",
        hint="example=(state, batch)",
    ):
        jf.capture(step, example=(state, batch(), {}))

"""Mistakes with the example's batch."""

from typing import Any

import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.errors import CaptureError
from tests.mistakes.common import batch, refused, training, wrapped


def test_leaves_that_differ_in_their_rows() -> None:
    step, state = training(wrapped())
    with refused(
        CaptureError,
        cause="the batch's leaves differ in their leading axis: 'batch/y' has 7, 'batch/x' has 8",
        line="jf.capture(step, example=(state, uneven))",
        hint="axis 0 of every batch leaf is the batch",
    ):
        uneven = {**batch(), "y": batch()["y"][:7]}
        jf.capture(step, example=(state, uneven))


@pytest.mark.parametrize(
    ("empty", "holds"),
    [({}, "nothing"), (None, "nothing"), ({"rate": 0.1}, "'batch/rate'")],
    ids=["nothing", "None", "a number"],
)
def test_a_batch_without_rows(empty: Any, holds: str) -> None:
    step, state = training(wrapped())
    with refused(
        CaptureError,
        cause=f"the batch has no leaf with rows: it holds {holds}",
        line="jf.capture(step, example=(state, empty))",
        hint="scalars come beside it",
    ):
        jf.capture(step, example=(state, empty))


def test_a_batch_of_no_rows() -> None:
    step, state = training(wrapped())
    with refused(
        CaptureError,
        cause="the batch has no rows: 'batch/x' has shape [0, 4]",
        line="jf.capture(step, example=(state, batch(0)))",
        hint="at least one row",
    ):
        jf.capture(step, example=(state, batch(0)))


def test_a_generator_in_the_place_of_a_batch() -> None:
    step, state = training(wrapped())
    with refused(
        CaptureError,
        cause="the batch leaf 'batch' is of type generator",
        line="jf.capture(step, example=(state, loader))",
        hint="next(iter(loader))",
    ):
        loader = (batch() for _ in range(3))
        jf.capture(step, example=(state, loader))


@pytest.mark.parametrize("names", [np.array(["a"] * 8), np.array([None] * 8), ["a"] * 8])
def test_a_batch_leaf_that_is_no_array_of_numbers(names: Any) -> None:
    step, state = training(wrapped())
    with refused(
        CaptureError,
        cause="the batch leaf 'batch/name",
        line="jf.capture(step, example=(state, {**batch()",
        hint="leave out what is not an array",
    ):
        jf.capture(step, example=(state, {**batch(), "names": names}))


def test_state_and_batch_the_wrong_way_round() -> None:
    step, state = training(wrapped())
    with refused(
        CaptureError,
        cause="the batch's leaves differ in their leading axis: 'batch/params/b' has 2",
        line="jf.capture(step, example=(batch(), state))",
        hint="axis 0 of every batch leaf is the batch",
    ):
        jf.capture(step, example=(batch(), state))

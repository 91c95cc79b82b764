"""Garbage is collected rarely during a capture, which restores the setting."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import jaxfleet as jf

EXAMPLE = (np.zeros(2, np.float32), np.ones((4, 2), np.float32))


@pytest.fixture(autouse=True)
def threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def seen_in(**fields: Any) -> list[int]:
    """Returns the garbage collector's threshold at each tracing of a step."""
    found: list[int] = []

    def step(state: Any, batch: Any) -> Any:
        found.append(gc.get_threshold()[0])
        if fields.get("fails"):
            raise ValueError("the step's own")
        return state + batch.mean(0), {}

    jf.capture(step, example=EXAMPLE)
    return found


def test_it_is_rare_during_a_capture_and_as_before_after_it() -> None:
    assert set(seen_in()) == {50_000}
    assert gc.get_threshold() == (700, 10, 10)


def test_it_is_as_before_after_an_error() -> None:
    with pytest.raises(ValueError, match="the step's own"):
        seen_in(fails=True)
    assert gc.get_threshold() == (700, 10, 10)


def test_a_collector_that_is_off_or_rarer_stays_so() -> None:
    for objects in (0, 80_000):
        gc.set_threshold(objects, 10, 10)
        assert set(seen_in()) == {objects}
        assert gc.get_threshold()[0] == objects


def test_other_threads_leave_it_alone() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(seen_in()))
    thread.start()
    thread.join(60)
    assert set(found) == {700}

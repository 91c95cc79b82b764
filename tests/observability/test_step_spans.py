"""Times of the newest steps by kind of work."""

import time
from contextlib import suppress

import pytest

from jaxfleet.observability import StepSpans

TICK_S = 0.5  # exact in binary


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> StepSpans:
    """Spans whose clock advances only by `spend`."""
    monkeypatch.setattr(time, "perf_counter", lambda: CLOCK[0])
    return StepSpans()


CLOCK = [0.0]


def spend(ticks: int) -> None:
    CLOCK[0] += ticks * TICK_S


def step(spans: StepSpans, computes: int, *, fails: bool = False) -> None:
    with spans.span("step", step=1):
        spend(1)
        for _ in range(2):
            with spans.span("compute"):
                spend(computes)
        with spans.span("send"):
            spend(2)
            with spans.span("wait for pull"):
                spend(3)
        if fails:
            raise InterruptedError


def test_spans_add_up_without_those_within_them(spans: StepSpans) -> None:
    step(spans, 9)  # compiles
    step(spans, 4)
    with spans.span("wait for stats"):  # of no step
        spend(7)
    (found,) = spans.newest(10)
    assert found.whole_s == (1 + 2 * 4 + 2 + 3) * TICK_S
    assert found.by_span == {"compute": 8 * TICK_S, "send": 2 * TICK_S, "wait for pull": 3 * TICK_S}


def test_the_newest_complete_steps_are_kept(spans: StepSpans) -> None:
    for number in range(200):
        with suppress(InterruptedError):
            step(spans, number, fails=number % 2 == 0)
    found = spans.newest(2)
    assert [x.by_span["compute"] for x in found] == [2 * 197 * TICK_S, 2 * 199 * TICK_S]
    assert len(spans.newest(1000)) <= 100
    assert spans.newest(0) == []

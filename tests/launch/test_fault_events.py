"""What `benchmarks/faults.py` finds in the events of a job."""

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FAULT_S = 2.5


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("systems.jobs")


def steps(jobs: Any, *ends: tuple[float, int]) -> list[Any]:
    return [jobs.Event(at, "trainer-0", "step", number) for at, number in ends]


def test_an_outage_ends_with_the_first_step_that_had_not_ended_before(jobs: Any) -> None:
    events = steps(jobs, (1, 1), (2, 2), (6, 1), (7, 2), (9, 3), (10, 4))
    assert jobs.outage_s(events, FAULT_S) == pytest.approx(6.5)


def test_a_gap_before_the_fault_is_no_outage(jobs: Any) -> None:
    events = steps(jobs, (0, 1), (2, 2), (3, 3), (3.5, 4))
    assert jobs.outage_s(events, FAULT_S) == pytest.approx(0.5)


def test_steps_after_a_restore_are_counted_as_repeated_once(jobs: Any) -> None:
    started = [jobs.Event(at, f"trainer-{n}", "restored", 0) for at, n in ((0.1, 0), (0.2, 1))]
    again = [jobs.Event(5, f"trainer-{n}", "restored", 1) for n in (1, 0)]
    events = [*started, *steps(jobs, (1, 1), (2, 2), (2.4, 3)), *again, *steps(jobs, (6, 2))]
    assert jobs.repeated(events, FAULT_S) == 2
    assert jobs.repeated(events[:-3], FAULT_S) == 0

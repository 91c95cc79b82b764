"""Deterministic simulation: many schedules, and the proof that it finds bugs."""

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from jaxfleet.testing.simulation import check, draw_schedule, explore
from jaxfleet.testing.simulation.faults import KillTrainer
from jaxfleet.testing.simulation.workload import Mode
from tests.testing.planted import BUGS

SCHEDULES = 300  # by default, in parts so that workers share them
PART = 30
GRID = 10_000
GRID_PART = 485
MOST = 2_000  # schedules in which a planted bug must be found


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Formats no warnings: thousands are expected."""
    caplog.set_level(logging.ERROR, "jaxfleet")


@pytest.mark.parametrize("first", range(0, SCHEDULES, PART))
def test_no_schedule_breaks_an_invariant(first: int) -> None:
    failures = list(explore(range(first, first + PART)))
    assert not failures, "\n".join(map(str, failures))


@pytest.mark.grid
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(SCHEDULES, GRID, GRID_PART))
def test_more_schedules_break_no_invariant(first: int) -> None:
    failures = list(explore(range(first, first + GRID_PART)))
    assert not failures, "\n".join(map(str, failures))


RETURNING = (
    Mode(None, True, 2, waits=True),
    Mode(None, True, 2, waits=True, saves=True),
    Mode(2, True, 2, waits=True),
    Mode(2, False, 2, relaxed="async", period=2, waits=True, saves=True),
    Mode(1, True, 2, relaxed="half_async", period=2, waits=True),
    Mode(2, True, 2, relaxed="dc_asgd", waits=True),
    Mode(1, False, 2, relaxed="fl", period=2, waits=True),
    Mode(2, False, 2, relaxed="fl", period=3, waits=True, saves=True),
)
KILLS = 6  # schedules with the loss of a trainer


@pytest.mark.grid
@pytest.mark.parametrize("mode", RETURNING, ids=str)
def test_trainers_that_return_break_no_invariant(mode: Mode) -> None:
    drawn = (draw_schedule(seed, mode) for seed in itertools.count())
    lost = (s for s in drawn if any(isinstance(fault, KillTrainer) for fault in s.faults.values()))
    for schedule in itertools.islice(lost, KILLS):
        assert not check(schedule)[1], str(schedule)


Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.few(1)
@pytest.mark.parametrize(("plant", "first"), BUGS.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_planted_bug_is_found_and_reduced(
    plant: Plant, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _find(plant, range(first, MOST), monkeypatch)


@pytest.mark.grid
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_by_the_first_schedules(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    _find(plant, range(MOST), monkeypatch)


def _find(plant: Plant, seeds: range, patch: pytest.MonkeyPatch) -> None:
    for seed in seeds[:1]:
        check(draw_schedule(seed))  # what jobs share is made without the bug
    plant(patch)
    failure = next(explore(seeds), None)
    assert failure is not None, f"not found in {len(seeds)} schedules"
    assert f"--seed {failure.schedule.seed}" in failure.command
    assert check(failure.schedule)[1] == failure.broken
    patch.undo()
    assert not check(failure.schedule)[1]  # the bug is why it failed


PLAYED = Mode(1, has_table=True)
SEEDS = (13, 15, 37, 13)
SCRIPT = """
from jaxfleet.testing.simulation import check, draw_schedule
from tests.testing.test_simulation import PLAYED, SEEDS
print([check(draw_schedule(seed, PLAYED))[0].digest for seed in SEEDS])
"""


@pytest.mark.grid
def test_one_seed_gives_one_run_in_any_process() -> None:
    """The digest covers every message; the order of sets differs between the processes."""
    other = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={
            **os.environ,
            "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1",
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    here = [check(draw_schedule(seed, PLAYED))[0].digest for seed in SEEDS]
    there, _ = other.communicate(timeout=250)
    assert json.loads(there.replace("'", '"')) == here
    assert here[0] == here[-1]

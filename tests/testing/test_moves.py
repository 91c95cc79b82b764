"""Simulated jobs move to other servers, and what a move must survive is judged precisely."""

import logging
from dataclasses import replace

import pytest

from jaxfleet.testing.simulation import Schedule, check, draw_schedule
from jaxfleet.testing.simulation.faults import (
    Fault,
    FullDisk,
    Join,
    KillServer,
    KillTrainer,
    Leave,
    Move,
)
from jaxfleet.testing.simulation.run import Run
from jaxfleet.testing.simulation.workload import Mode
from tests.faults.changing_jobs import changes

TO_3_TO_1 = (Move(0.0, 3), Move(0.1, 1))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "jaxfleet")


def schedule(mode: Mode, *faults: Fault, seed: int = 0, keeps_checkpoints: bool = True) -> Schedule:
    return Schedule(seed, mode, keeps_checkpoints, (0.6, 0.5), dict(enumerate(faults)))


def counts(run: Run) -> list[list[int]]:
    """Returns the numbers of servers that each trainer had, one after the other."""
    return [changes(record.servers) for record in run.trainers]


MODES = [Mode(moves=True), Mode(has_table=True, moves=True), Mode(changes=True, moves=True)]


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_job_that_moves_twice_is_as_one_with_fixed_servers(mode: Mode) -> None:
    run, found = check(schedule(mode, *TO_3_TO_1))
    assert not found
    assert counts(run) == [[2, 3, 1]] * 2
    assert sorted(number for number, _ in run.former) == [1, 2]
    for _, end in run.former:
        assert (end.error, end.is_up, end.is_told) == (None, False, False)


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", [Leave(1, 3), Join(0.5)], ids=lambda fault: type(fault).__name__)
def test_a_job_moves_while_its_trainers_change(fault: Fault) -> None:
    run, found = check(schedule(Mode(changes=True, moves=True), *TO_3_TO_1, fault))
    assert not found
    assert counts(run)[0] == [2, 3, 1]


def test_servers_to_which_a_job_does_not_move_are_ended() -> None:
    """Its state cannot be saved for them."""
    run, found = check(schedule(Mode(moves=True), Move(0.0, 3), FullDisk(0.5, 5.0, 1)))
    assert not found
    assert counts(run) == [[2]] * 2
    assert [(number, end.is_told) for number, end in run.former] == [(2, True)]


@pytest.mark.grid
@pytest.mark.parametrize("kill", [KillServer(1, 0.1), KillTrainer(0, None), KillTrainer(1, None)])
def test_no_kill_in_the_middle_of_a_move_ends_the_job(kill: KillServer | KillTrainer) -> None:
    """At all times of a move; a trainer of a job that goes on without lost ones."""
    mode = Mode(changes=isinstance(kill, KillTrainer), moves=True)
    for tenth in range(9, 45, 3):
        run, found = check(schedule(mode, Move(0.0, 3), replace(kill, at_s=tenth / 10)))
        assert not found
        assert not run.errors


@pytest.mark.grid
def test_many_drawn_jobs_that_are_to_move_do() -> None:
    drawn = [draw_schedule(seed, Mode(moves=True)) for seed in range(12)]
    asked = [s for s in drawn if any(isinstance(fault, Move) for fault in s.faults.values())]
    moved = [any(len(each) > 1 for each in counts(check(s)[0])) for s in asked]
    assert len(asked) > len(drawn) / 2
    assert sum(moved) > len(asked) / 3

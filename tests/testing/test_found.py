"""Bugs that the simulation found, each as the schedule that it was reduced to."""

import pytest

from jaxfleet.testing.simulation import Schedule, check
from jaxfleet.testing.simulation.faults import Fault, KillServer, LossOfOne, Reset
from jaxfleet.testing.simulation.job import Run
from jaxfleet.testing.simulation.workload import Mode
from jaxfleet.transport.messages import Kind


def survives(mode: Mode, *faults: Fault, keeps_checkpoints: bool = True) -> Run:
    """Fails unless a job ends well in spite of some faults."""
    schedule = Schedule(
        0,
        mode,
        keeps_checkpoints=keeps_checkpoints,
        pace_s=(0.1, 0.1),
        faults=dict(enumerate(faults)),
    )
    assert schedule.must_succeed
    run, found = check(schedule)
    assert not found
    return run


def test_a_program_that_is_lost_on_its_way_to_a_restarted_server_is_sent_first() -> None:
    """Found by seeds 1708, 2648 and 2693: the state was sent again before the program."""
    kill = KillServer(0, 1.0, at_operation=4, loses_power=True)
    run = survives(Mode(servers=1), kill, LossOfOne(Kind.DEFINE, 1))
    assert run.servers[0].starts == 2


RESTORING = Mode(saves=True, restores=True)


@pytest.mark.parametrize("number", [17, 18])  # to either trainer, in the last step before
def test_no_state_is_restored_while_a_trainer_waits_for_values(number: int) -> None:
    """Found by seeds 8034 and 8275: its servers then had an older step, and it ended the job."""
    survives(RESTORING, LossOfOne(Kind.VALUES, number), keeps_checkpoints=False)


@pytest.mark.parametrize(
    ("mode", "number"), [(RESTORING, 5), (Mode(1, saves=True, restores=True), 2)], ids=str
)
def test_a_trainer_that_lost_an_answer_still_takes_part_in_a_restore(
    mode: Mode, number: int
) -> None:
    """Found by seed 10354: loading a checkpoint discarded the answer that it asked for again."""
    survives(mode, LossOfOne(Kind.REDUCED, number), keeps_checkpoints=False)


@pytest.mark.parametrize("at_s", [1.9, 2.2])  # while others load, and in the step after it
def test_a_connection_may_break_after_a_restore(at_s: float) -> None:
    """Found by seeds 10761 and 10905: pushes of void steps counted as lost."""
    survives(RESTORING, Reset(at_s, 1, 0), keeps_checkpoints=False)

"""Bugs that the simulation found, each as the schedule that it was reduced to."""

from jaxfleet.testing.simulation import Schedule, check
from jaxfleet.testing.simulation.faults import Fault, KillServer, LossOfOne
from jaxfleet.testing.simulation.workload import Mode
from jaxfleet.transport.messages import Kind


def survives(mode: Mode, *faults: Fault) -> None:
    """Fails unless a job with checkpoints ends well in spite of some faults."""
    schedule = Schedule(
        0, mode, keeps_checkpoints=True, pace_s=(0.1, 0.1), faults=dict(enumerate(faults))
    )
    assert schedule.must_succeed
    run, found = check(schedule)
    assert not found
    assert any(end.starts > 1 for end in run.servers)


def test_a_program_that_is_lost_on_its_way_to_a_restarted_server_is_sent_first() -> None:
    """Found by seeds 1708, 2648 and 2693: the state was sent again before the program."""
    kill = KillServer(0, 1.0, at_operation=4, loses_power=True)
    survives(Mode(servers=1), kill, LossOfOne(Kind.DEFINE, 1))

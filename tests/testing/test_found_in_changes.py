"""Bugs that the simulation found in changes of a job's trainers and servers, by their seeds."""

import pytest

from jaxfleet.testing.simulation import Schedule, check
from jaxfleet.testing.simulation.faults import (
    Delay,
    Duplication,
    Fault,
    Join,
    KillServer,
    Leave,
    Loss,
    LossOfOne,
    Move,
    Partition,
    Reset,
    SlowPeer,
    Stop,
)
from jaxfleet.testing.simulation.schedule import UNBOUNDED
from jaxfleet.testing.simulation.workload import Mode
from jaxfleet.transport.messages import Kind


class Found:
    """A schedule that a job did not survive, and what holds since."""

    def __init__(
        self, seed: int, what: str, mode: Mode, pace_s: tuple[float, ...], *faults: Fault
    ) -> None:
        self.what = what
        self.schedule = Schedule(seed, mode, True, pace_s, dict(enumerate(faults)))

    def __str__(self) -> str:
        return self.what.replace(" ", "_")


FOUND = (
    Found(
        7049,
        "a process joins at the servers to which a job moves",
        Mode(has_table=True, changes=True, moves=True),
        (0.603409, 0.677736),
        Delay(at_s=1.796192, for_s=2.739122, most_s=0.2),
        Duplication(at_s=6.267782, for_s=2.077353, share=0.1, later_s=1.0),
        Delay(at_s=4.042661, for_s=2.887508, most_s=0.02),
        Join(at_s=1.801409),
        Leave(trainer=1, after_step=1),
        Move(at_s=0.284366, servers=1),
        Move(at_s=1.483295, servers=2),
    ),
    Found(
        33276,
        "a server that has missed two changes goes by the steps, not by former numbers",
        Mode(has_table=True, changes=True, moves=True),
        (0.605249, 0.640458),
        Duplication(at_s=4.195954, for_s=0.218772, share=0.5, later_s=0.05),
        KillServer(server=1, away_s=1.168575, at_operation=65, loses_power=True),
        LossOfOne(kind=Kind.LOAD, number=9),
        Join(at_s=2.328165),
        Join(at_s=1.321571),
    ),
    Found(
        35575,
        "server 0 takes out a trainer that leaves, though others have gone on without it",
        Mode(staleness=4, has_table=True, relaxed="geo", period=2, leases=True, changes=True),
        (0.514192, 0.472336),
        Partition(
            at_s=0.096499,
            for_s=0.100238,
            one="trainer 0",
            other="server 0",
            lost=False,
            one_way=False,
        ),
        KillServer(server=1, away_s=1.073976, at_operation=27, loses_power=True),
        KillServer(server=0, away_s=0.370389, at_s=2.900828),
        Join(at_s=1.138068),
        Join(at_s=1.029011),
        Leave(trainer=0, after_step=2),
    ),
    Found(
        38519,
        "what a server has saved of a trainer is not that of the next one with its number",
        Mode(staleness=3, relaxed="dc_asgd", leases=True, changes=True),
        (0.078744, 0.394183),
        KillServer(server=0, away_s=1.422024, at_s=3.040065),
        Leave(trainer=0, after_step=4),
    ),
    Found(
        45451,
        "a server begins an epoch that has begun elsewhere before that of a process that joins",
        Mode(staleness=UNBOUNDED, leases=True, changes=True),
        (0.410011, 0.179312),
        Reset(at_s=1.466888, trainer=1, server=1),
        KillServer(server=1, away_s=0.507034, at_s=3.602722, loses_power=True),
        Reset(at_s=1.35675, trainer=1, server=0),
        Join(at_s=1.27742),
        Join(at_s=1.867132),
    ),
    Found(
        53226,
        "a server that was started again knows that trainers of a relaxed mode have trained",
        Mode(staleness=2, has_table=True, period=2, leases=True, changes=True),
        (0.319355, 0.159245),
        Delay(at_s=1.101833, for_s=0.891191, most_s=0.6),
        KillServer(server=1, away_s=0.117793, at_operation=34),
        KillServer(server=0, away_s=0.203713, at_s=3.365308, loses_power=True),
        Duplication(at_s=2.347364, for_s=1.727027, share=0.5, later_s=0.0),
        Leave(trainer=0, after_step=1),
    ),
    Found(
        80581,
        "a checkpoint of former trainers is not enough for those that end",
        Mode(servers=1, moves=True),
        (0.653222, 0.551462),
        LossOfOne(kind=Kind.PULL, number=24),
        KillServer(server=2, away_s=2.179105, at_operation=39),
        Reset(at_s=1.312943, trainer=0, server=2),
        Loss(at_s=7.338399, for_s=2.431946, share=1.0),
        Move(at_s=1.478944, servers=3),
        Move(at_s=2.553755, servers=1),
    ),
    Found(
        88936,
        "no trainer takes another place once others have ended their scripts",
        Mode(saves=True, restores=True, moves=True),
        (0.713372, 0.274371),
        KillServer(server=0, away_s=2.93408, at_s=7.078105, loses_power=True),
        Loss(at_s=0.814166, for_s=2.339487, share=0.5),
        Move(at_s=1.058609, servers=3),
    ),
    Found(
        217616,
        "server 0 decides only when all trainers have greeted it again",
        Mode(has_table=True, servers=1, moves=True),
        (0.698328, 0.601822),
        Loss(at_s=4.286876, for_s=1.466227, share=0.5),
        KillServer(server=0, away_s=2.228104, at_s=2.109608),
        Loss(at_s=0.357844, for_s=2.189908, share=0.05),
        Stop(at_s=4.913867, for_s=0.361813, process="trainer 1"),
        Move(at_s=0.712053, servers=2),
        Move(at_s=0.907183, servers=3),
    ),
    Found(
        231147,
        "a restore does not wait for steps that others have discarded",
        Mode(has_table=True, saves=True, restores=True, moves=True),
        (0.271529, 0.76059),
        KillServer(server=2, away_s=0.512034, at_operation=36, loses_power=True),
        Loss(at_s=7.486217, for_s=0.464883, share=0.2),
        Move(at_s=0.115507, servers=3),
    ),
    Found(
        302381,
        "a new server that dies while the job is asked to move is started again",
        Mode(moves=True),
        (0.569363, 0.350841),
        KillServer(server=2, away_s=1.421707, at_s=5.166428),
        KillServer(server=0, away_s=1.728049, at_operation=14),
        Loss(at_s=4.026753, for_s=1.849715, share=0.05),
        Move(at_s=1.291332, servers=3),
        Move(at_s=2.084521, servers=1),
    ),
    Found(
        335816,
        "it is said again to a server that all have come to their places",
        Mode(servers=1, moves=True),
        (0.773824, 0.473569),
        SlowPeer(at_s=3.745382, for_s=2.606115, process="trainer 1", most_s=0.3),
        Delay(at_s=0.734944, for_s=2.983222, most_s=0.2),
        KillServer(server=0, away_s=2.789031, at_s=3.738768, loses_power=True),
        Reset(at_s=4.688807, trainer=1, server=2),
        Reset(at_s=5.460604, trainer=1, server=1),
        Loss(at_s=2.648157, for_s=0.886297, share=0.5),
        Loss(at_s=2.667304, for_s=1.07765, share=0.2),
        Move(at_s=0.688352, servers=3),
        Move(at_s=1.792821, servers=1),
    ),
    Found(
        438337,
        "a void checkpoint does not come back after a loss of power",
        Mode(has_table=True, saves=True, restores=True, moves=True),
        (0.268364, 0.442179),
        Delay(at_s=6.612385, for_s=1.675283, most_s=0.6),
        KillServer(server=2, away_s=1.585927, at_s=7.694358, loses_power=True),
        Reset(at_s=5.702635, trainer=1, server=1),
        Move(at_s=1.254207, servers=3),
    ),
    Found(
        603393,
        "a server that has begun an epoch again gets level before it ends it",
        Mode(changes=True),
        (0.499476, 0.085845),
        KillServer(server=1, away_s=0.12969, at_s=0.243793),
        Duplication(at_s=0.590593, for_s=0.290631, share=1.0, later_s=0.05),
        KillServer(server=1, away_s=1.537205, at_s=3.194021, loses_power=True),
        Join(at_s=0.764589),
        Join(at_s=3.741794),
        Join(at_s=2.247853),
    ),
    Found(
        637066,
        "a server that was started again is told who does nothing more",
        Mode(changes=True),
        (0.138445, 0.471027),
        Duplication(at_s=0.398869, for_s=2.777417, share=0.5, later_s=1.0),
        KillServer(server=1, away_s=0.191888, at_s=0.864073),
        KillServer(server=0, away_s=2.523665, at_s=2.329393),
        Join(at_s=1.038716),
        Leave(trainer=0, after_step=3),
        Join(at_s=3.296947),
    ),
    Found(
        985760,
        "a process joins when server 0 was killed while the job moves",
        Mode(has_table=True, changes=True, moves=True),
        (0.471907, 0.566748),
        Stop(at_s=2.988054, for_s=0.641655, process="server 2"),
        KillServer(server=2, away_s=0.594058, at_operation=23, loses_power=True),
        KillServer(server=0, away_s=2.275430, at_s=2.357176, loses_power=True),
        Duplication(at_s=2.998173, for_s=0.97913, share=1.0, later_s=1.0),
        Leave(trainer=1, after_step=3),
        Join(at_s=2.029717),
        Move(at_s=0.155484, servers=3),
    ),
    Found(
        993388,
        "a process that joins waits for those that have not greeted server 0 again",
        Mode(staleness=2, has_table=True, period=2, leases=True, changes=True),
        (0.321256, 0.20962),
        KillServer(server=0, away_s=2.818147, at_s=3.392651),
        Duplication(at_s=1.942158, for_s=1.651884, share=0.5, later_s=0.05),
        Stop(at_s=1.644731, for_s=0.071595, process="trainer 1"),
        Reset(at_s=2.190011, trainer=1, server=1),
        Partition(
            at_s=1.269568,
            for_s=0.677197,
            one="trainer 0",
            other="server 1",
            lost=False,
            one_way=True,
        ),
        Partition(
            at_s=2.427566,
            for_s=0.125525,
            one="trainer 0",
            other="server 1",
            lost=False,
            one_way=False,
        ),
        Reset(at_s=1.798657, trainer=1, server=1),
        Leave(trainer=1, after_step=1),
        Join(at_s=0.796554),
    ),
)


@pytest.mark.few(1)
@pytest.mark.parametrize("found", FOUND, ids=str)
def test_a_job_survives_what_it_did_not(found: Found) -> None:
    assert found.schedule.must_succeed
    _, broken = check(found.schedule)
    assert not broken

"""A schedule: the job and the faults that one seed draws."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from jaxfleet.testing.simulation.faults import (
    ClockJump,
    Delay,
    Duplication,
    Fault,
    FullDisk,
    Join,
    KillServer,
    KillTrainer,
    Leave,
    Loss,
    LossOfOne,
    Move,
    Partition,
    Reset,
    SlowPeer,
    Stop,
)
from jaxfleet.testing.simulation.workload import (
    LOST_AFTER_S,
    MOST_SERVERS,
    STEPS,
    TRAINER_RETURN_S,
    TRAINERS,
    Mode,
)
from jaxfleet.transport.messages import Kind

RETURNS_S = 15.0  # how long trainers wait for a server
_MOVE_S = 2.0  # within which the first move, and each one after it, is asked for
_PACE_S = 0.2  # by which steps take longer where a job moves, so that it has time for two moves
_JOB_S = 4.0  # faults begin within this time; a job without any takes about as long
_ROOM_S = LOST_AFTER_S - 2.0  # of silence: two heartbeats less than what counts as a loss
_FULL_S = 6.0  # for which a restored state may wait for space on a disk
UNBOUNDED = 100  # a staleness bound that no job reaches
_SERVERS_LIVE = 0.8  # how often no server is killed where trainers change
_NEWER, _FIRST = 0.2, 300  # how often a mode of `_NEWER_MODES` is drawn, and from which seed on
_MODES = {
    Mode(None, False, 2): 2,
    Mode(None, False, 1): 1,
    Mode(None, True, 2): 2,
    Mode(None, True, 1): 1,
    Mode(1, False, 2): 2,
    Mode(1, True, 2): 2,
    Mode(3, True, 2): 1,
    Mode(3, False, 1): 1,
    Mode(None, False, 2, waits=True): 2,
    Mode(None, False, 1, waits=True): 1,
    Mode(2, False, 2, relaxed="async", period=2): 1,
    Mode(2, False, 2, relaxed="half_async"): 1,
    Mode(1, True, 2, relaxed="half_async", period=2): 1,
    Mode(1, False, 2, relaxed="dc_asgd"): 1,
    Mode(2, True, 2, relaxed="dc_asgd"): 1,
    Mode(1, False, 2, relaxed="geo"): 1,
    Mode(1, False, 2, relaxed="geo", period=2): 1,
    Mode(2, True, 2, relaxed="geo", period=2): 1,
    Mode(1, False, 2, relaxed="fl", period=2): 1,
    Mode(None, False, 2, saves=True, restores=True): 1,
    Mode(None, True, 2, saves=True, restores=True): 1,
    Mode(None, False, 2, waits=True, saves=True): 1,
    Mode(2, True, 2, saves=True, restores=True): 1,
    Mode(1, False, 2, relaxed="half_async", period=2, saves=True, restores=True): 1,
    Mode(2, True, 2, relaxed="geo", period=2, saves=True): 1,
}
_NEWER_MODES = [
    Mode(None, servers=1, changes=True),
    Mode(None, changes=True),
    Mode(None, changes=True),
    Mode(None, has_table=True, servers=1, changes=True),
    Mode(None, has_table=True, changes=True),
    Mode(None, has_table=True, changes=True),
    Mode(UNBOUNDED, leases=True),
    Mode(UNBOUNDED, has_table=True, period=2, leases=True),
    Mode(2, has_table=True, leases=True),
    Mode(2, servers=1, leases=True),
    Mode(UNBOUNDED, relaxed="half_async", period=2, leases=True),
    Mode(UNBOUNDED, relaxed="dc_asgd", leases=True),
    Mode(UNBOUNDED, relaxed="geo", period=2, leases=True),
    Mode(3, relaxed="geo", leases=True),
    Mode(UNBOUNDED, leases=True, changes=True),
    Mode(2, has_table=True, period=2, leases=True, changes=True),
    Mode(2, servers=1, leases=True, changes=True),
    Mode(4, relaxed="half_async", period=2, leases=True, changes=True),
    Mode(3, relaxed="dc_asgd", leases=True, changes=True),
    Mode(4, has_table=True, relaxed="geo", period=2, leases=True, changes=True),
    Mode(1, relaxed="fl", period=2, waits=True),
    Mode(2, relaxed="fl", period=3, waits=True, saves=True),
]
_MOVING, _WELL_TESTED = 0.15, 2  # how often a mode of `_MOVING_MODES` is drawn; before `_FIRST`
_MOVING_MODES = [
    Mode(moves=True),
    Mode(has_table=True, moves=True),
    Mode(servers=1, moves=True),
    Mode(has_table=True, servers=1, moves=True),
    Mode(saves=True, restores=True, moves=True),
    Mode(has_table=True, saves=True, restores=True, moves=True),
    Mode(changes=True, moves=True),
    Mode(has_table=True, changes=True, moves=True),
]
_SLOWER = 2.0  # faults begin within so many times the time where a job moves, which takes longer
_LOST_KINDS = (
    Kind.HELLO, Kind.WELCOME, Kind.DEFINE, Kind.ASSIGN, Kind.PUSH, Kind.PULL, Kind.VALUES,
    Kind.LOOK_UP, Kind.ROWS, Kind.PUSH_ROWS, Kind.PENDING, Kind.SAVE, Kind.BYE, Kind.OK,
    Kind.ERROR, Kind.REDUCE, Kind.REDUCED,
)  # fmt: skip
_OF_MOVES = (Kind.MOVE, Kind.MEMBERS, Kind.LOAD, Kind.SAVE, Kind.BYE, Kind.HELLO, Kind.HEARTBEAT)


@dataclass(frozen=True)
class Schedule:
    """What happens in one run.

    Attributes:
        keeps_checkpoints: servers save, and trainers wait for one that is started again.
        pace_s: the duration of each trainer's step.
        faults: by number; leaving some out changes nothing else.
    """

    seed: int
    mode: Mode
    keeps_checkpoints: bool
    pace_s: tuple[float, ...]
    faults: dict[int, Fault]

    def without(self, numbers: set[int]) -> "Schedule":
        """Returns the schedule without some of its faults."""
        kept = {number: fault for number, fault in self.faults.items() if number not in numbers}
        return replace(self, faults=kept)

    @property
    def must_succeed(self) -> bool:
        """Whether all processes must end well, as the faults are within what a job survives.

        A job that moves to other servers survives what it does otherwise.
        """
        found = list(self.faults.values())
        if self.mode.changes and not self._is_left(found):
            return False
        kills = [fault for fault in found if isinstance(fault, KillServer)]
        lost = [fault for fault in found if isinstance(fault, KillTrainer)]
        is_needed = not (self.mode.changes or self._needs_not(lost, kills))
        if lost and is_needed and not self._may_return(lost, kills):
            return False
        if kills and not self.keeps_checkpoints:
            return False
        full_s = sum(fault.for_s for fault in found if isinstance(fault, FullDisk))
        if full_s and kills:
            return False  # trainers keep what servers cannot save, but not without a limit
        has_loads = self.mode.restores or self.mode.moves
        if full_s > _FULL_S and has_loads and self.keeps_checkpoints:
            return False  # a restored state must be on servers' disks before the job goes on
        if sum(kill.away_s + _ROOM_S for kill in kills) > RETURNS_S:
            return False
        return sum(map(_silence_s, found)) <= _ROOM_S

    def _may_return(self, lost: list[KillTrainer], kills: list[KillServer]) -> bool:
        """Whether lost trainers are waited for; a server may lack what only they could send."""
        away_s = [one.away_s for one in lost if one.away_s is not None]
        in_time = len(away_s) == len(lost) and sum(away_s) < TRAINER_RETURN_S
        return self.mode.waits and in_time and not kills

    def _is_left(self, found: list[Fault]) -> bool:
        """Whether a trainer is there throughout, and what only one has that is lost."""
        gone = {x.trainer for x in found if isinstance(x, KillTrainer | Leave)}
        has_lost = any(isinstance(x, KillTrainer) for x in found)
        is_killed = any(isinstance(x, KillServer) for x in found)
        return len(gone) < TRAINERS and not (has_lost and is_killed)

    def _needs_not(self, lost: list[KillTrainer], kills: list[KillServer]) -> bool:
        """Whether others take over the samples of lost trainers; trainer 0 sends the state."""
        is_enough = self.mode.leases and (self.mode.staleness or 0) >= UNBOUNDED
        return is_enough and not kills and all(x.trainer and x.away_s is None for x in lost)

    @property
    def lost_trainers(self) -> int:
        """How often trainers are killed."""
        return sum(isinstance(fault, KillTrainer) for fault in self.faults.values())

    @property
    def loses_server(self) -> bool:
        """Whether a server is away for longer than trainers wait for it."""
        kills = [fault for fault in self.faults.values() if isinstance(fault, KillServer)]
        return any(kill.away_s > RETURNS_S for kill in kills)

    @property
    def has_silence(self) -> bool:
        """Whether a living process may count as lost."""
        return sum(map(_silence_s, self.faults.values())) > _ROOM_S

    def __str__(self) -> str:
        kept = "with checkpoints" if self.keeps_checkpoints else "without checkpoints"
        lines = [f"seed {self.seed}: {self.mode}, {kept}"]
        lines += [f"  {number}: {described(fault)}" for number, fault in self.faults.items()]
        return "\n".join(lines)


def _silence_s(fault: Fault) -> float:
    """Returns for how long a peer of a living process may hear nothing of it."""
    match fault:
        case Partition() | Stop():
            return fault.for_s
        case ClockJump():
            return fault.by_s
        case Delay() | SlowPeer():
            return 2 * fault.most_s  # there and back
        case _:
            return 0.0


def described(fault: Fault) -> str:
    """Describes a fault: `Reset(at_s=1.20, trainer=0, server=1)`."""
    given = []
    for field in fields(fault):
        value = getattr(fault, field.name)
        text = f"{value:.3f}" if isinstance(value, float) else str(getattr(value, "value", value))
        given.append(f"{field.name}={text}")
    return f"{type(fault).__name__}({', '.join(given)})"


def draw_schedule(seed: int, mode: Mode | None = None) -> Schedule:
    """Draws the schedule of a seed; with another mode than the drawn one, if given."""
    draw = random.Random(f"{seed}/schedule")  # noqa: S311  # not for secrets
    (drawn,) = draw.choices(list(_MODES), list(_MODES.values()))
    mode = mode or _drawn_moving(seed) or _drawn_apart(seed) or drawn
    keeps = draw.random() < 0.7
    pace_s = tuple(draw.uniform(0.02, 0.6) for _ in range(TRAINERS))
    kinds = draw.choices(list(_DRAWS), [share for share, _ in _DRAWS.values()], k=_count(draw))
    faults = {number: _DRAWS[kind][1](draw, mode) for number, kind in enumerate(kinds)}
    if mode.changes:
        if draw.random() < _SERVERS_LIVE:
            faults = {n: fault for n, fault in faults.items() if not isinstance(fault, KillServer)}
        faults |= dict(enumerate(_drawn_changes(draw), len(kinds)))
    if mode.moves:
        pace_s = tuple(pace + _PACE_S for pace in pace_s)
        faults = {n: _later(fault) for n, fault in faults.items()}
        faults |= dict(enumerate(_drawn_moves(draw, mode), max(faults, default=-1) + 1))
    return Schedule(seed, mode, keeps, pace_s, faults)


def _drawn_moving(seed: int) -> Mode | None:
    """Returns a mode of jobs that move for some seeds; all others keep their schedules."""
    draw = random.Random(f"{seed}/servers")  # noqa: S311  # not for secrets
    modes = _MOVING_MODES if seed >= _FIRST else _MOVING_MODES[:_WELL_TESTED]
    return draw.choice(modes) if draw.random() < _MOVING else None


def _later(fault: Fault) -> Fault:
    """Returns a fault of a job that takes longer."""
    at_s = getattr(fault, "at_s", None)
    return fault if at_s is None else replace(fault, at_s=_SLOWER * at_s)


def _drawn_moves(draw: random.Random, mode: Mode) -> Iterator[Fault]:
    servers, at_s = mode.servers, 0.0
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 2, 2))):
        servers = draw.choice([n for n in range(1, MOST_SERVERS + 1) if n != servers])
        at_s += draw.uniform(0.0, _MOVE_S)
        yield Move(at_s, servers)


def _drawn_apart(seed: int) -> Mode | None:
    """Returns a newer mode for some seeds; all others keep the schedules that they had.

    The first seeds are those of the default tests, whose modes take long enough to compile.
    """
    draw = random.Random(f"{seed}/mode")  # noqa: S311  # not for secrets
    return draw.choice(_NEWER_MODES) if seed >= _FIRST and draw.random() < _NEWER else None


def _drawn_changes(draw: random.Random) -> Iterator[Fault]:
    for _ in range(draw.choice((1, 1, 2, 3))):
        if draw.random() < 0.5:
            yield Join(_at(draw))
        else:
            yield Leave(draw.randrange(TRAINERS), draw.randrange(1, STEPS))


def _count(draw: random.Random) -> int:
    return draw.choice((1, 2, 2, 3, 3, 4, 5, 7))


def _at(draw: random.Random) -> float:
    return draw.uniform(0.0, _JOB_S)


def _short(draw: random.Random) -> float:
    """Draws a duration that a job survives, but for one time in ten."""
    return draw.uniform(0.05, 1.2) if draw.random() < 0.9 else draw.uniform(1.2, 12.0)


def _process(draw: random.Random, mode: Mode) -> str:
    names = [f"trainer {n}" for n in range(TRAINERS)] + [
        f"server {n}" for n in range(mode.most_servers)
    ]
    return draw.choice(names)


def _kill(draw: random.Random, mode: Mode) -> Fault:
    server, power = draw.randrange(mode.most_servers), draw.random() < 0.5
    away_s = draw.uniform(0.05, 3.0) if draw.random() < 0.95 else 60.0
    if draw.random() < 0.5:
        at = draw.randrange(1, 80 if mode.moves else 40)
        return KillServer(server, away_s, at_operation=at, loses_power=power)
    return KillServer(server, away_s, at_s=_at(draw), loses_power=power)


def _kill_trainer(draw: random.Random, mode: Mode) -> Fault:
    trainer = draw.randrange(TRAINERS)
    away_s = draw.uniform(0.1, 12.0) if mode.waits or draw.random() < 0.5 else None
    if mode.changes:
        away_s = None  # the job goes on without it
    if draw.random() < 0.5:
        return KillTrainer(trainer, away_s, at_message=draw.randrange(60))
    return KillTrainer(trainer, away_s, at_s=_at(draw))


_DRAWS: dict[str, tuple[int, Callable[[random.Random, Mode], Fault]]] = {
    "loss": (3, lambda d, _: Loss(_at(d), d.uniform(0.1, 3.0), d.choice((0.05, 0.2, 0.5, 1.0)))),
    "one": (4, lambda d, m: LossOfOne(d.choice(_LOST_KINDS + _OF_MOVES * m.moves),
                                      d.randrange(32 if m.moves else 16))),
    "twice": (3, lambda d, _: Duplication(_at(d), d.uniform(0.1, 3.0), d.choice((0.1, 0.5, 1.0)),
                                          d.choice((0.0, 0.05, 1.0)))),
    "delay": (2, lambda d, _: Delay(_at(d), d.uniform(0.1, 3.0), d.choice((0.02, 0.2, 0.6)))),
    "slow": (2, lambda d, m: SlowPeer(_at(d), d.uniform(0.1, 3.0), _process(d, m),
                                      d.choice((0.05, 0.3, 0.6)))),
    "reset": (4, lambda d, m: Reset(_at(d), d.randrange(TRAINERS), d.randrange(m.most_servers))),
    "partition": (2, lambda d, m: Partition(_at(d), _short(d), f"trainer {d.randrange(TRAINERS)}",
                                            f"server {d.randrange(m.most_servers)}",
                                            d.random() < 0.5, d.random() < 0.3)),
    "kill": (7, _kill),
    "kill trainer": (2, _kill_trainer),
    "stop": (2, lambda d, m: Stop(_at(d), _short(d), _process(d, m))),
    "jump": (2, lambda d, m: ClockJump(_at(d), _process(d, m), _short(d))),
    "full": (2, lambda d, m: FullDisk(_at(d), d.uniform(0.1, 12.0), d.randrange(m.most_servers))),
}  # fmt: skip

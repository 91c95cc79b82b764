"""The faults of a schedule, each of which can be left out to see whether the failure needs it."""

import random
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from jaxfleet.transport.messages import Kind

BEATS = frozenset({Kind.HEARTBEAT})


@dataclass(frozen=True)
class Span:
    """A fault that lasts from `at_s` for `for_s` seconds."""

    at_s: float
    for_s: float

    def holds(self, now_s: float) -> bool:
        return self.at_s <= now_s < self.at_s + self.for_s


@dataclass(frozen=True)
class Loss(Span):
    """Messages are lost, except heartbeats."""

    share: float


@dataclass(frozen=True)
class LossOfOne:
    """One message is lost: that of a kind with this number, counted from 0 over all processes."""

    kind: Kind
    number: int


@dataclass(frozen=True)
class Duplication(Span):
    """Messages arrive twice, the second time after up to `later_s`."""

    share: float
    later_s: float


@dataclass(frozen=True)
class Delay(Span):
    """Messages take up to `most_s` longer, so that those of different peers overtake each other."""

    most_s: float


@dataclass(frozen=True)
class SlowPeer(Span):
    """Messages to and from a process take longer."""

    process: str
    most_s: float


@dataclass(frozen=True)
class Reset:
    """The connection between a trainer and a server breaks; what is under way is lost."""

    at_s: float
    trainer: int
    server: int


@dataclass(frozen=True)
class Partition(Span):
    """Messages between two processes wait, or are `lost`; both ways, or only those of `one`."""

    one: str
    other: str
    lost: bool
    one_way: bool


@dataclass(frozen=True)
class KillServer:
    """A server is killed, and started again after `away_s`.

    At a time, or during an operation of its disk, counted from its start. If the machine loses its
    power, so are writes that were not synced.
    """

    server: int
    away_s: float
    at_s: float | None = None
    at_operation: int | None = None
    loses_power: bool = False


@dataclass(frozen=True)
class KillTrainer:
    """A trainer is killed, and its script started again after `away_s`, if given.

    At a time, or before it sends a message, counted from the begin of the job.
    """

    trainer: int
    away_s: float | None
    at_s: float | None = None
    at_message: int | None = None


@dataclass(frozen=True)
class Leave:
    """A trainer leaves the job after a step."""

    trainer: int
    after_step: int


@dataclass(frozen=True)
class Join:
    """Another process joins the job."""

    at_s: float


@dataclass(frozen=True)
class Move:
    """The launch is asked for another number of servers, again until the job has it or ends."""

    at_s: float
    servers: int


@dataclass(frozen=True)
class Stop(Span):
    """A process is suspended, as by SIGSTOP."""

    process: str


@dataclass(frozen=True)
class ClockJump:
    """A process's clocks jump ahead, as after the suspension of a virtual machine."""

    at_s: float
    process: str
    by_s: float


@dataclass(frozen=True)
class FullDisk(Span):
    """A server's disk has no space left."""

    server: int


Fault: TypeAlias = (
    Loss | LossOfOne | Duplication | Delay | SlowPeer | Reset | Partition | KillServer
    | KillTrainer | Leave | Join | Move | Stop | ClockJump | FullDisk
)  # fmt: skip


@dataclass
class Fate:
    """What happens to a message: the delays of its copies; none if it is lost.

    Attributes:
        held_s: how long it waits before, in the queue of its connection.
    """

    delays_s: tuple[float, ...]
    held_s: float = 0.0


class Weather:
    """The faults of messages, each with a generator of its own."""

    SHORT_S: ClassVar[float] = 1e-3  # of the usual delay

    def __init__(self, seed: int, faults: dict[int, Fault]) -> None:
        self._faults = [(x, random.Random(f"{seed}/{at}")) for at, x in faults.items()]  # noqa: S311
        self._usual = random.Random(f"{seed}/delay")  # noqa: S311
        self._counts: dict[Kind, int] = {}

    def fate(self, now_s: float, sender: str, receiver: str, kind: Kind) -> Fate:
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        delay_s = self._usual.uniform(0.1, 2.0) * self.SHORT_S
        held_s, copies = 0.0, 1
        later_s = 0.0
        ends = {sender, receiver}
        for fault, draw in self._faults:
            match fault:
                case LossOfOne():
                    copies *= not (fault.kind is kind and fault.number == number)
                case Loss() if fault.holds(now_s) and kind not in BEATS:
                    copies *= draw.random() >= fault.share
                case Duplication() if fault.holds(now_s) and draw.random() < fault.share:
                    copies, later_s = copies * 2, draw.uniform(0.0, fault.later_s)
                case Delay() if fault.holds(now_s):
                    delay_s += draw.uniform(0.0, fault.most_s)
                case SlowPeer() if fault.holds(now_s) and fault.process in ends:
                    delay_s += draw.uniform(0.0, fault.most_s)
                case Partition() if fault.holds(now_s) and ends == {fault.one, fault.other}:
                    if not fault.one_way or sender == fault.one:
                        held_s = max(held_s, fault.at_s + fault.for_s - now_s)
                        copies *= not fault.lost
                case _:
                    pass
        return Fate((delay_s, delay_s + later_s)[:copies], held_s)

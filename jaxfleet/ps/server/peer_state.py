"""What a server knows of a trainer or of another server, and of trainers that have left."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from jaxfleet.ps.server.outbox import RequestLog
from jaxfleet.transport.messages import Peer, Plain

_LONGEST = 200  # characters of a scalar's name
_MOST_SCALARS = 64  # of one trainer; the rest is left out
_BEATS_S = 1.5  # heartbeats come every second; less than the silence that the board reports


@dataclass(frozen=True)
class TrainerReport:
    """What a trainer's last heartbeat reported for the job's metrics.

    Attributes:
        resident: bytes of its resident memory; 0 if unknown.
        scalar_step: the step of its scalar metrics.
        scalars: their values by name.
    """

    resident: int = 0
    scalar_step: int = 0
    scalars: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, body: Mapping[str, Plain]) -> "TrainerReport":
        """Returns the report in a heartbeat; leaves out whatever is malformed or too much."""
        given = body.get("scalars")
        pairs = islice(given.items(), _MOST_SCALARS) if isinstance(given, dict) else ()
        scalars = {
            name: float(value)
            for name, value in pairs
            if isinstance(value, int | float) and len(name) <= _LONGEST and _is_text(name)
        }
        numbers = body.get("resident"), body.get("scalar_step")
        resident, step = (x if isinstance(x, int) and 0 <= x < 1 << 63 else 0 for x in numbers)
        return cls(resident, step, scalars)


def _is_text(name: str) -> bool:
    """Whether a name can be written in UTF-8; lone surrogates cannot."""
    return name.isprintable()


@dataclass
class PeerState:
    """State of a trainer, or of another server.

    Attributes:
        heard: time of its last message.
        said: time of its last heartbeat.
        doing: its last reported activity.
        session: distinguishes processes with the same number.
        ended: when the connection of its hello ended; None while it is open.
        beats: the connection of its last heartbeat, if any.
        has_stopped: that connection has ended as well.
        life: how often this number was started before this process.
        seen: the greatest step of former processes with this number; None if there was none.
        step: the greatest step of its messages.
        pushed: the last step of its pushes, and of those of former processes with this number.
        late_s: cumulative delay of its steps behind the first trainer.
        answered: time of the last message to it.
        own_s: cumulative time from the last message to it until its next step's first message.
        joins: how many processes with this number have come.
        report: what its last heartbeat reported for the metrics.
        log: requests of this process that must not be executed twice.
    """

    peer: Peer
    heard: float
    said: float
    doing: str = "hello"
    session: Plain = None
    ended: float | None = None
    beats: Peer | None = None
    has_stopped: bool = False
    life: int = 0
    seen: int | None = None
    left: bool = False
    step: int = 0
    pushed: int = 0
    late_s: float = 0.0
    answered: float | None = None
    own_s: float = 0.0
    incarnation: Plain = None
    joins: int = 1
    report: TrainerReport = field(default_factory=TrainerReport)
    log: RequestLog = field(default_factory=RequestLog)

    def text(self, now: float) -> str:
        """Describes its last activity: `last heartbeat 0.3 s ago: compiling`."""
        return f"last heartbeat {now - self.said:.1f} s ago: {self.doing}"

    def is_connected(self, now: float) -> bool:
        """Whether any of its connections is open, as far as is known.

        A live process may lose that of its hello, and opens another when it next waits for an
        answer. Meanwhile its heartbeats arrive, on a connection of their own, which may be
        replaced too.
        """
        if self.ended is None:
            return True
        return not self.has_stopped and now - max(self.ended, self.said) <= _BEATS_S


@dataclass(frozen=True)
class Departures:
    """The trainers that had left when a server was killed.

    Attributes:
        sessions: sessions of those that have left.
        present: sessions of the others that had connected.
        is_certain: recorded in this launch of the job; otherwise possibly in an earlier one.
    """

    trainers: int
    sessions: dict[int, Plain]
    present: dict[int, Plain]
    is_certain: bool = False

    def is_of_another_run(self, trainer: int, session: Plain) -> bool:
        """Whether a trainer's hello shows that those that left were of an earlier run."""
        known = self.sessions if self.is_certain else {**self.present, **self.sessions}
        return known.get(trainer, session) != session

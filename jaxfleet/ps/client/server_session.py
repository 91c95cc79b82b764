"""The state of a trainer's session with one server."""

from dataclasses import dataclass, field

from jaxfleet.ps.client.heartbeat import Pulse
from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.ps.client.replay_log import ReplayLog
from jaxfleet.transport.messages import Kind, Message


class ServerRestartedError(Exception):
    """A server restarted during its recovery, which starts over."""

    def __init__(self, server: int) -> None:
        super().__init__(f"server {server} started again")
        self.server = server


@dataclass
class ServerSession:
    """The state of a trainer's session with one server.

    Attributes:
        step: the last step that it had applied at its welcome.
        pushed: the last step whose gradients were sent to it.
        applied: the last of them that it is known to have applied.
        sequence: the last two steps with pushes, of parameters ('') and of each table.
        has_state: it has reported a state.
        welcomes: the incarnations that sent a welcome.
        greeted: the incarnation that received the last hello, once known.
        is_greeted: it has sent a welcome since its restart was detected.
        is_level: it has received all that this trainer sent.
        is_returning: its recovery is in progress.
        is_past: it has begun another epoch, and has what this trainer did in this one.
        held_back: numbers of the requests that its recovery sends last; before the program, or the
            pushes, a server would reject them.
        repeated: numbers of requests that may be answered again: those resent, also on behalf of
            other trainers, and those whose error was raised.
        damage: the checkpoints it could not read, as reported by its welcome, and why.
        is_restored: it was restarted from a recovery checkpoint while other trainers trained.
        seen: the greatest step of former processes of this trainer; None if it knows of none.
        received: the last step of the pushes that it has of them; -1 if not reported.
        base: the step of the state that the job began with.
        takes_pushes: this trainer sends it gradients of parameters or rows.
        rows: the last step of which it has all rows that this trainer pushed, if trainers wait for
            each other and there are tables.
        oldest: what was due last: the number of the oldest pending request, or the first step whose
            push it is not known to have applied.
        damaged: consecutive frames that it could not read.
        is_renewed: the connection was replaced for that, and nothing was read since.
        check_at_s: when to check that it has received the pending requests, and the pushes.
        exchange_s: time spent sending pushes and waiting for their values, not reported to it yet.
        clock: the step up to which the last values included all trainers' pushes, if trainers do
            not wait for each other; -1 if not reported.
    """

    replay: ReplayLog
    number: int = 0
    step: int = -1
    pushed: int = -1
    applied: int = -1
    sequence: dict[str, tuple[int, int]] = field(default_factory=dict)
    has_state: bool = False
    waiting: dict[int, PendingRequest] = field(default_factory=dict)
    welcomes: set[str] = field(default_factory=set)
    greeted: str = ""
    is_greeted: bool = False
    is_level: bool = True
    is_returning: bool = False
    is_past: bool = False
    held_back: frozenset[int] = frozenset()
    repeated: set[int] = field(default_factory=set)
    clock: int = -1
    damage: str = ""
    is_restored: bool = False
    seen: int | None = None
    received: int = -1
    base: int = -1
    takes_pushes: bool = True
    rows: int | None = None
    oldest: tuple[int | None, int | None] = (None, None)
    damaged: int = 0
    is_renewed: bool = False
    check_at_s: float = 0.0
    exchange_s: float = 0.0

    @property
    def is_open(self) -> bool:
        return bool(self.welcomes)

    def is_unknown(self, pulse: Pulse) -> bool:
        """Whether a heartbeat is of an incarnation that has sent no welcome."""
        return bool(pulse.incarnation) and str(pulse.incarnation) not in self.welcomes

    def welcome(self, message: Message) -> None:
        body = message.body
        step = body.get("step")
        self.greeted = str(body.get("incarnation", ""))
        self.welcomes.add(self.greeted)
        self.step = self.applied = step if isinstance(step, int) else -1
        self.has_state = self.has_state or self.step >= 0
        self.damage = str(body.get("damage") or "")
        seen, base, rows = body.get("seen"), body.get("base"), body.get("rows")
        received = body.get("pushed")
        self.seen = seen if isinstance(seen, int) else None
        self.received = received if isinstance(received, int) else -1
        self.base = base if isinstance(base, int) else -1
        self.rows = rows if isinstance(rows, int) else None
        self.is_restored = body.get("restored") is True
        self.takes_pushes = body.get("takes_pushes") is not False

    def is_void_answer(self, request: PendingRequest) -> bool:
        """Whether an answer is from an earlier life, to which its new one does not hold.

        Leases that arrive after the hello that declares those of this trainer are such.
        """
        is_late = self.is_returning and not self.is_greeted
        return is_late and request.message.kind is Kind.LEASE

    def has_answered(self, request: PendingRequest) -> None:
        del self.waiting[request.message.number]
        self.damaged, self.is_renewed = 0, False
        kind = request.message.kind
        self.has_state = self.has_state or kind in {Kind.ASSIGN, Kind.PULL, Kind.SAVE}
        applied = request.answer.body.get("applied") if request.answer is not None else None
        if kind is Kind.PULL and isinstance(applied, int):
            self._has_applied(applied)

    def hear(self, pulse: Pulse) -> None:
        """Discards the pushes that a heartbeat reports as saved or applied."""
        self.replay.saved(pulse.saved)
        if pulse.incarnation == self.greeted:
            self._has_applied(pulse.step)

    def _has_applied(self, step: int) -> None:
        self.applied = max(self.applied, step)
        self.replay.applied(step)

    def is_due(self, now: float, every_s: float) -> bool:
        """Whether to check what was sent, since nothing was answered or applied for a while.

        Without a request that waits for it, a push may be lost as well, and others wait for it.
        """
        oldest: tuple[int | None, int | None] = next(iter(self.waiting), None), None
        if oldest[0] is None and self.is_level and self.pushed > self.applied:
            oldest = None, self.replay.first_after(self.applied)
        if oldest != self.oldest:
            self.oldest, self.check_at_s = oldest, now + every_s
        return oldest != (None, None) and now >= self.check_at_s

    def push_after(self, step: int, table: str = "") -> int:
        """Returns the step of the preceding push, of parameters or a table; -1 for the first."""
        before, last = self.sequence.get(table, (-1, -1))
        if step > last:
            before, last = last, step
        self.sequence[table] = before, last
        return before

    def sent_whole(self) -> int:
        """Returns the last step that was sent completely, -1 if there is none.

        Merged gradients wait for later steps; those of tables may be sent earlier.
        """
        return min((last for _, last in self.sequence.values()), default=-1)

    def rewind(self, step: int) -> None:
        self.replay.rewind(step)
        self.pushed = min(self.pushed, step)
        for table, (before, last) in self.sequence.items():
            self.sequence[table] = min(before, step), min(last, step)

    def resume(self, step: int) -> None:
        """Goes on after a step, up to which a former process of this trainer sent its pushes."""
        self.replay.forgotten = self.pushed = self.applied = step

    def lost_work(self) -> str | None:
        """Describes the permanently lost work of this trainer, if any."""
        first = self.replay.first_step()
        why = f": {self.damage}" if self.damage else ""
        if self.step < 0 and self.has_state:
            return f"it came back without a state{why}"
        if self.replay.forgotten > self.step:
            kept = "none" if first is None else f"those from step {first} on"
            return f"it came back at step {self.step}, and of later pushes, {kept} are kept{why}"
        return None


def value_clock(message: Message, before: int) -> int:
    """Returns the clock of a reply with values, otherwise the previous clock."""
    clock = message.body.get("clock")
    return clock if isinstance(clock, int) and message.kind is Kind.VALUES else before

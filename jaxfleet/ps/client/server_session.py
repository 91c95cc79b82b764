"""A trainer's session with one server: pending requests and their errors, and the replay log."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.errors import (
    CheckpointError,
    ConnectError,
    JaxfleetError,
    PeerLostError,
    ProgramError,
)
from jaxfleet.ps.client.heartbeat import Pulse
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.transport.messages import Kind, Message, Tensor

COLLECTIVE_KINDS = frozenset({Kind.REDUCE, Kind.BARRIER, Kind.ASSIGN})


@dataclass(eq=False)
class PendingRequest:
    """One request to one server, until its reply is complete.

    Attributes:
        wants: names still missing from the reply; empty if any reply completes it.
        answer: the last message of the reply, once complete.
    """

    server: int
    message: Message
    wants: set[str] = field(default_factory=set)
    sink: Callable[[Sequence[Tensor]], None] | None = None
    answer: Message | None = None

    @property
    def is_done(self) -> bool:
        return self.answer is not None

    def take(self, message: Message) -> None:
        """Takes a reply or a part of it; duplicates are ignored."""
        fresh = [x for x in message.tensors if not self.wants or x.name in self.wants]
        if self.sink is not None and fresh:
            self.sink(fresh)
        self.wants.difference_update(tensor.name for tensor in fresh)
        if not self.wants:
            self.answer = message

    def __str__(self) -> str:
        body, kind = self.message.body, self.message.kind.value
        names = sorted(self.wants)
        if names:
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            return f"{kind} of {', '.join(names[:2])}{more}"
        if kind == "look_up":
            return f"rows of table '{body.get('table')}'"
        if kind in {"shrink", "export"}:
            return f"{kind} of table '{body.get('table')}'"
        if kind == "reduce":
            return f"sum '{body.get('key')}' over all trainers"
        if kind == "barrier":
            return f"barrier '{body.get('name')}'"
        return kind


@dataclass
class ReplayLog:
    """Pushes to one server by step, and the collective requests of all trainers to it.

    With `until_saved`, as servers may be restarted, pushes are kept until the server's recovery
    checkpoint contains them. Otherwise they are kept until the server has applied them, since a
    broken connection loses messages in flight. `forgotten` is the last step with a discarded push.

    Collective requests are kept while another trainer may still wait for them: one that is a step
    behind lost its reply with the server, where this trainer had received its own.
    """

    until_saved: bool
    bytes: int = 0
    forgotten: int = -1
    _steps: dict[int, list[Message]] = field(default_factory=dict)
    _together: list[tuple[int, Message]] = field(default_factory=list)  # with the step of each

    def add(self, message: Message, step: int | None = None) -> None:
        """Keeps a message until its step, or the given one, is applied or saved."""
        self._steps.setdefault(message.step if step is None else step, []).append(message)
        self.bytes += _size(message)

    def add_together(self, message: Message, step: int) -> None:
        """Keeps a collective request of a step until this trainer is two steps further."""
        if self.until_saved and message.kind in COLLECTIVE_KINDS:
            kept = [
                (at, old) for at, old in self._together if at >= step - 1 and old is not message
            ]
            self._together = [*kept, (step, message)]

    def restart(self, step: int) -> None:
        """Keeps the collective requests as those of a step, to which all have returned."""
        self._together = [(step, message) for _, message in self._together]

    def together(self, step: int) -> list[Message]:
        """Returns the requests that others may still wait for while this trainer is at a step."""
        return [message for at, message in self._together if at >= step - 1]

    def saved(self, step: int) -> None:
        """Discards the pushes that a checkpoint after a step contains."""
        for old in [known for known in self._steps if known <= step]:
            self._forget(old)

    def applied(self, step: int) -> None:
        """Discards the pushes of an applied step, unless they are kept until saved."""
        if not self.until_saved:
            self.saved(step)

    def shrink(self, excess_bytes: int) -> int:
        """Discards the oldest steps until this many bytes are free; returns the number discarded.

        The newest step stays.
        """
        goal, count = self.bytes - excess_bytes, 0
        for old in sorted(self._steps)[:-1]:
            if self.bytes <= goal:
                break
            self._forget(old)
            count += 1
        return count

    def rewind(self, step: int) -> None:
        """Discards the pushes after a step, from which all trainers restart."""
        for void in [known for known in self._steps if known > step]:
            self.bytes -= sum(map(_size, self._steps.pop(void)))
        self.forgotten = min(self.forgotten, step)  # a server that lacks the later ones is right

    def first_after(self, step: int) -> int | None:
        """Returns the first step after one whose pushes are kept."""
        return min((known for known in self._steps if known > step), default=None)

    def after(self, step: int) -> Iterator[tuple[int, list[Message]]]:
        for known in sorted(self._steps):
            if known > step:
                yield known, list(self._steps.get(known, ()))

    def first_step(self) -> int | None:
        return min(self._steps, default=None)

    def _forget(self, step: int) -> None:
        self.bytes -= sum(map(_size, self._steps.pop(step)))
        self.forgotten = max(self.forgotten, step)


def _size(message: Message) -> int:
    return sum(tensor.array.nbytes for tensor in message.tensors)


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


_ERRORS: Mapping[str, type[JaxfleetError]] = {
    "peer_lost": PeerLostError,
    "timeout": PeerLostError,
    "checkpoint": CheckpointError,
}


def refusal_error(me: TrainerIdentity, server: int, message: Message) -> JaxfleetError:
    """Returns the exception for a server's error message."""
    body, where = message.body, me.server_name(server)
    what = f"{body.get('what', 'no reason given')} (reported by {where})"
    hint = str(body["hint"]) if body.get("hint") else None
    return _ERRORS.get(str(body.get("error")), ProgramError)(what, hint=hint)


def timeout_error(
    me: TrainerIdentity,
    request: PendingRequest,
    limit_s: float,
    error: type[JaxfleetError],
    pulse: Pulse | None,
) -> JaxfleetError:
    """Returns the error for a request that timed out."""
    where = me.server_name(request.server)
    what = f"{me.name} waited {limit_s:.0f} s at step {request.message.step} for {request}"
    what = f"{what} from {where}{_last_heard(pulse)}"
    hint = "see what that server, and the trainers it waits for, are doing"
    if error is ConnectError:
        hint = "start the servers, with the same endpoints and secret"
    return error(what, hint=hint)


def describe_wait(
    me: TrainerIdentity, request: PendingRequest, others: int, pulse: Pulse | None
) -> str:
    """Describes a trainer's wait for the log."""
    where, more = me.server_name(request.server), f", and {others} more" if others else ""
    what = f"{me.name} waits at step {request.message.step} for {request} from {where}{more}"
    lost = f"; it has lost {', '.join(pulse.lost)}" if pulse is not None and pulse.lost else ""
    return f"{what}{_last_heard(pulse)}{lost}"


def _last_heard(pulse: Pulse | None) -> str:
    if pulse is None:
        return ""
    if pulse.last_heard_s is None:
        return ", which has never sent a heartbeat"
    return f"; its last heartbeat reported '{pulse.doing}'"


def lost_server_error(
    me: TrainerIdentity,
    server: int,
    requests: Sequence[PendingRequest],
    *,
    step: int,
    limit_s: float,
    doing: str,
) -> PeerLostError:
    """Returns the error for a lost server."""
    waits = [r for r in requests if r.server == server and not r.is_done]
    for_what = f" while {me.name} waited for {waits[0]}" if waits else ""
    what = (
        f"{me.server_name(server)} was lost at step {step}{for_what}: no "
        f"heartbeat for {limit_s:.1f} s; its last reported '{doing}'"
    )
    return PeerLostError(what, hint="look at that server's log; start the job again")

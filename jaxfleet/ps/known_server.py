"""What a trainer knows of one server: which of its lives it is in, and what waits for it."""

from dataclasses import dataclass, field

from jaxfleet.ps.messages import Kind, Message
from jaxfleet.ps.replay import ReplayLog
from jaxfleet.ps.requests import Request


class StartedAgainError(Exception):
    """A server started again while it was brought level; it is begun anew.

    Args:
        server: which.
    """

    def __init__(self, server: int) -> None:
        super().__init__(f"server {server} started again")
        self.server = server


@dataclass
class KnownServer:
    """One server.

    Attributes:
        replay: what was sent, to bring it level.
        number: of the last request.
        step: the last step that it had applied when it said welcome.
        pushed: the last step of which it was sent gradients.
        sequence: the last two steps of pushes, of parameters ('') and of each table.
        has_state: it has told that it has a state.
        waiting: requests by number.
        welcomes: the incarnations that said welcome.
        greeted: the incarnation that the last hello was for, once that is known.
        is_greeted: it said welcome since it was found to have started again.
        is_level: it has all that this trainer sent.
        is_returning: it is being brought level.
        repeated: numbers of requests to which another answer may come: those that were sent again,
            for others' sake too, and those whose error was raised.
        damage: which of its checkpoints it could not read when it said welcome, and why.
        oldest: the number of the request that has waited longest, 0 where none waits.
        damaged: frames in a row that it could not read.
        check_at_s: when to ask whether the server has what waits.
        clock: the step until which all trainers' pushes were in the values that came last, where
            trainers do not wait for each other; -1 where it does not say.
    """

    replay: ReplayLog
    number: int = 0
    step: int = -1
    pushed: int = -1
    sequence: dict[str, tuple[int, int]] = field(default_factory=dict)
    has_state: bool = False
    waiting: dict[int, Request] = field(default_factory=dict)
    welcomes: set[str] = field(default_factory=set)
    greeted: str = ""
    is_greeted: bool = False
    is_level: bool = True
    is_returning: bool = False
    repeated: set[int] = field(default_factory=set)
    clock: int = -1
    damage: str = ""
    oldest: int = 0
    damaged: int = 0
    check_at_s: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether it ever said welcome."""
        return bool(self.welcomes)

    def welcome(self, message: Message) -> None:
        """Takes the answer to a hello."""
        body = message.body
        step = body.get("step")
        self.greeted = str(body.get("incarnation", ""))
        self.welcomes.add(self.greeted)
        self.step = step if isinstance(step, int) else -1
        self.has_state = self.has_state or self.step >= 0
        self.damage = str(body.get("damage") or "")

    def has_answered(self, request: Request) -> None:
        """Notes an answer that is complete."""
        del self.waiting[request.message.number]
        self.damaged = 0
        kind = request.message.kind
        self.has_state = self.has_state or kind in {Kind.ASSIGN, Kind.PULL, Kind.SAVE}
        applied = request.answer.body.get("applied") if request.answer is not None else None
        if kind is Kind.PULL and isinstance(applied, int):
            self.replay.applied(applied)

    def is_due(self, now: float, every_s: float) -> bool:
        """Returns whether to ask if the server has what waits: nothing was answered for a while."""
        oldest = next(iter(self.waiting), 0)
        if oldest != self.oldest:
            self.oldest, self.check_at_s = oldest, now + every_s
        return bool(oldest) and now >= self.check_at_s

    def push_after(self, step: int, table: str = "") -> int:
        """Returns the step of the push before one, of parameters or a table; -1 for the first."""
        before, last = self.sequence.get(table, (-1, -1))
        if step > last:
            before, last = last, step
        self.sequence[table] = before, last
        return before

    def rewind(self, step: int) -> None:
        """Forgets the pushes after a step, from which all go on anew."""
        self.replay.rewind(step)
        self.pushed = min(self.pushed, step)
        for table, (before, last) in self.sequence.items():
            self.sequence[table] = min(before, step), min(last, step)

    def lost_work(self) -> str | None:
        """Says what of this trainer's work is lost for good, if any is."""
        first = self.replay.first_step()
        why = f": {self.damage}" if self.damage else ""
        if self.step < 0 and self.has_state:
            return f"it came back without a state{why}"
        if self.replay.forgotten > self.step:
            kept = "none" if first is None else f"those from step {first} on"
            return f"it came back at step {self.step}, and of later pushes, {kept} are kept{why}"
        return None


def clock_of(message: Message, before: int) -> int:
    """Returns how old the values of an answer are at the most; as before, where it has none."""
    clock = message.body.get("clock")
    return clock if isinstance(clock, int) and message.kind is Kind.VALUES else before

"""The members of a server's job: those that are, those that follow, and who may change them."""

from dataclasses import dataclass, field

from jaxfleet.ps.membership import Membership
from jaxfleet.ps.server.join_candidates import JoinCandidates
from jaxfleet.ps.server.outbox import RequestError
from jaxfleet.ps.server.trainer_registry import TrainerRegistry
from jaxfleet.transport.messages import Message, Plain


@dataclass
class Members:
    """The members of a job, as one server knows them.

    Attributes:
        current: the membership whose trainers the registry has; without sessions in epoch 0, and
            when the server was started again until a trainer has come.
        following: the next one, while the server is closing; None otherwise.
        candidates: processes that wait to become members.
        fixed: why the members cannot change; empty if they can.
        willing: processes that a SIGTERM lets leave.
        rows: those of the whole batch; 0 if unknown.
        moved_at: when the first trainer came of a job that has moved here; None if it has not, or
            if its members have changed since.
    """

    trainers: TrainerRegistry
    current: Membership = field(default_factory=Membership)
    following: Membership | None = None
    candidates: JoinCandidates = field(default_factory=JoinCandidates)
    fixed: str = "none of its trainers has come yet"
    willing: set[str] = field(default_factory=set)
    rows: int = 0
    moved_at: float | None = None

    @property
    def newest(self) -> Membership:
        return self.following or self.current

    def sessions(self) -> tuple[str, ...]:
        """Returns the processes of the newest membership, in order."""
        if self.newest.sessions:
            return self.newest.sessions
        known = self.trainers.by_id
        return tuple(str(known[number].session) for number in sorted(known))

    def plain(self) -> dict[str, Plain]:
        """Returns what heartbeats tell of the membership."""
        return self.newest.plain() if self.newest.sessions else {}

    def note_hello(self, message: Message) -> None:
        """Notes whether a trainer, and so the job, can change its members."""
        fixed = message.body.get("fixed")
        self.fixed = fixed if isinstance(fixed, str) else "its trainers are of another version"
        if message.body.get("leaves") is True:
            self.willing.add(str(message.body.get("session")))
        self.willing &= {*self.sessions()}  # without those that have left or were replaced

    def check_change(self, what: str) -> None:
        """Rejects a request for a change of the members if they are fixed.

        Raises:
            RequestError: they are.
        """
        if self.fixed:
            raise RequestError("refused", f"no trainer can {what}: {self.fixed}")

    def forgive(self, seconds: float, now: float) -> None:
        """Discounts silence while this process was suspended."""
        self.candidates.forgive(seconds, now)
        if self.moved_at is not None:
            self.moved_at = min(self.moved_at + seconds, now)

    def is_lost(self, session: str, now: float) -> bool:
        heard = self.heard(session)
        return heard is None or now - heard > self.trainers.options.lost_after_s

    def heard(self, session: str) -> float | None:
        """Returns when a process was last heard; None if never since this server was started."""
        known = self.trainers.process(session)
        return known.heard if known is not None else self.candidates.heard(session)

    def named(self, session: str, now: float) -> str:
        """Describes a lost process."""
        for number, known in self.trainers.by_id.items():
            if known.session == session:
                return f"trainer {number} is lost, {known.text(now)}"
        return "a process that was joining is lost"

    def divisor(self, most: int) -> int:
        """Returns the greatest number of trainers that can share the batch."""
        return next((n for n in range(most, 1, -1) if self.rows % n == 0), 1)

"""Leases of samples from server 0, requested while a trainer computes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxfleet.errors import PeerLostError
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.lease_log import Lease
from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.transport.messages import Kind, Message, Plain


@dataclass(frozen=True)
class LeaseAnswer:
    """What server 0 answered.

    Attributes:
        leases: of one batch each; there may be none at the moment.
        has_ended: all samples of all epochs are accounted for.
        level: the greatest step of any trainer.
        holders: the other trainers that have leases.
    """

    leases: tuple[Lease, ...]
    has_ended: bool
    level: int
    holders: tuple[int, ...]

    @classmethod
    def of(cls, message: Message) -> "LeaseAnswer":
        body = message.body
        leases, level, holders = body.get("leases"), body.get("level"), body.get("holders")
        assert isinstance(leases, list)
        assert isinstance(holders, list)
        assert isinstance(level, int)
        found = tuple(_lease(plain) for plain in leases)
        return cls(found, bool(body.get("ended")), level, tuple(int(str(n)) for n in holders))


def _lease(plain: Plain) -> Lease:
    assert isinstance(plain, list)
    spans = []
    for span in plain:
        assert isinstance(span, list)
        start, stop = span
        assert isinstance(start, int)
        assert isinstance(stop, int)
        spans.append((start, stop))
    return tuple(spans)


@dataclass
class DataLeases:
    """The leases of a trainer for the batches of one loader.

    Args:
        client: of the servers.
        order: the loader's, and `done`, the steps of the whole job that came before the ledger.
        rows: samples of one batch.
        epochs: None for no end.
    """

    client: Client
    order: Mapping[str, Plain]
    rows: int
    epochs: int | None
    _asked: PendingRequest | None = None
    _generation: int = 0
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self.client.leases.order = self.order
        self.client.leases.answered = self._answered
        self._generation = self.client.leases.generation
        self._since = self.client.clock_s()

    @property
    def is_void(self) -> bool:
        """Whether a checkpoint was restored since the leases were made."""
        return self._generation != self.client.leases.generation

    def follow(self, client: Client) -> None:
        """Goes on with the client of another place in the job, which has the same leases.

        A request that is under way has no answer any more: servers have only leases that were
        declared.
        """
        if client is self.client:
            return
        self.client = client
        if self._asked is not None and not self._asked.is_done:
            self._asked = None

    def ask(self, batches: int) -> None:
        """Requests leases, unless a request is under way."""
        if self._asked is None:
            body = {**self.order, "rows": self.rows, "chunks": batches, "epochs": self.epochs}
            self._asked = self.client.request(0, Kind.LEASE, body=body)

    def answer(self, *, wait: bool) -> LeaseAnswer | None:
        """Returns the answer to the last request; None if there is none yet.

        Raises:
            PeerLostError: a server, or the trainers that have the last leases, are gone or late.
            ProgramError: the job leases no samples, or those of another loader.
        """
        asked = self._asked
        if asked is None:
            return None
        if wait:
            self.client.wait([asked])
        elif not asked.is_done:
            self.client.poll()
        if asked.answer is None:
            return None
        self._asked = None
        answer = LeaseAnswer.of(asked.answer)
        self.client.leases.held += answer.leases
        self._look(answer)
        return answer

    def _answered(self) -> tuple[Lease, ...]:
        answer = self._asked.answer if self._asked is not None else None
        return LeaseAnswer.of(answer).leases if answer is not None else ()

    def restart(self) -> None:
        """Begins anew after a checkpoint was restored; an answer to an older request is void."""
        if self._asked is not None:
            self.client.wait([self._asked])
        self._asked, self._generation = None, self.client.leases.generation

    def _look(self, answer: LeaseAnswer) -> None:
        """Fails once no trainer has made a step for the longest time that one may take."""
        now, timeouts = self.client.clock_s(), self.client.timeouts
        if answer.leases or answer.has_ended or answer.level > self.client.step:
            self._since = now
        limit_s = timeouts.step_timeout_s + timeouts.lost_after_s + timeouts.server_return_s
        if now - self._since > limit_s:
            others = ", ".join(f"trainer {number}" for number in answer.holders) or "no trainer"
            what = f"{self.client.me.name} waited {now - self._since:.0f} s for samples, which"
            hint = "look at what they are doing; step_timeout_s says how long a step may take"
            raise PeerLostError(f"{what} {others} leased and did not push", hint=hint)

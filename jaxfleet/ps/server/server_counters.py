"""What a server counts of its messages and trainers, for metrics and for trainers that ask."""

import time
from collections import Counter
from dataclasses import dataclass, field

from jaxfleet.observability import resident_bytes
from jaxfleet.observability.trainer_metrics import TrainerMetrics
from jaxfleet.ps.server.metrics import ServerMetrics
from jaxfleet.ps.server.outbox import Outbox, Request, tensors_bytes
from jaxfleet.ps.server.peer_state import PeerState
from jaxfleet.ps.server.request_router import RequestRouter
from jaxfleet.ps.server.trainer_registry import TrainerRegistry
from jaxfleet.transport.messages import Kind, Message, Plain


@dataclass
class ServerCounters:
    """Counters of a server, and the metrics that it publishes.

    Attributes:
        rejected: malformed frames, as counted by the listener.
        is_ended: the server has ended.
    """

    outbox: Outbox
    trainers: TrainerRegistry
    router: RequestRouter
    rejected: int = 0
    is_ended: bool = False
    _started: float = field(init=False)
    _counts: Counter[Kind] = field(default_factory=Counter)
    _received_bytes: int = 0
    _sent_bytes: int = 0

    def __post_init__(self) -> None:
        self._started = time.time()

    def received(self, message: Message) -> None:
        self._counts[message.kind] += 1
        self._received_bytes += tensors_bytes(message.tensors)

    def sent(self, message: Message) -> None:
        self._sent_bytes += tensors_bytes(message.tensors)

    def answer(self, request: Request) -> None:
        """Answers a trainer that asks for the counters."""
        self.outbox.reply(request, Kind.OK, {**self._counted(), "messages": {**self._messages()}})

    def metrics(self, now: float, *, is_failed: bool) -> ServerMetrics:
        """Returns the metrics of now; `is_failed` if an error ended the server."""
        return ServerMetrics(
            self.outbox.name,
            self._counted(),
            self._messages(),
            self._received_bytes,
            self._sent_bytes,
            tuple(
                self._of_trainer(number, known, now)
                for number, known in sorted(self.trainers.by_id.items())
            ),
            resident_bytes(),
            self._started,
            is_ended=self.is_ended,
            is_failed=is_failed,
        )

    def _of_trainer(self, number: int, known: PeerState, now: float) -> TrainerMetrics:
        report = known.report
        return TrainerMetrics(
            number,
            known.step,
            now - known.heard,
            known.late_s,
            self.trainers.doing(number, now),
            known.left,
            known.own_s,
            self.trainers.is_lost(number, now),
            known.joins,
            report.resident,
            report.scalar_step,
            report.scalars,
            is_connected=known.is_connected(now),
        )

    def _messages(self) -> dict[str, int]:
        return {kind.value: count for kind, count in self._counts.items()}

    def _counted(self) -> dict[str, Plain]:
        refused: dict[str, Plain] = {"errors": self.outbox.errors, "rejected": self.rejected}
        return {**self.router.stats(), **refused}

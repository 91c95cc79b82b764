"""Watches a run from inside: how long clients wait, and how much processes keep."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxfleet.errors import JaxfleetError, PeerLostError
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.ps.server import ServerCore
from jaxfleet.ps.server.metrics import ServerMetrics
from jaxfleet.testing.simulation.scheduler import Scheduler
from jaxfleet.testing.simulation.workload import PLACES

_MOST_KEPT = 4  # times the limit of pushes, while servers have no room to save them
_PUSH_BYTES = 2 * 1300  # of a step's gradients and rows, as servers and clients count them
_MOST_QUEUED = PLACES  # every push at most once
_MOST_REQUESTS = 300  # of one client, pending or remembered


@dataclass
class Waits:
    """Waits of clients that exceeded their limit.

    Attributes:
        late: descriptions of them.
        excused_s: time for which processes were suspended, or their clocks jumped.
    """

    late: list[str] = field(default_factory=list)
    excused_s: float = 0.0


@dataclass
class Sizes:
    """What exceeded its bound."""

    beyond: list[str] = field(default_factory=list)

    def look_at_server(self, core: ServerCore, metrics: ServerMetrics) -> None:
        held = metrics.counted.get("queued_bytes", 0)
        assert isinstance(held, int)
        if held > _MOST_QUEUED * _PUSH_BYTES:
            self.beyond.append(f"{core.outbox.name} has queued {held} bytes of pushes")
        for number, known in core.trainers.by_id.items():
            if len(known.log.pending) > _MOST_REQUESTS:
                self.beyond.append(f"{core.outbox.name} keeps requests of trainer {number}")

    def look_at_client(self, client: Client) -> None:
        limit = client.replay.limit_bytes
        if limit and client.replay.bytes > _MOST_KEPT * limit + _MOST_QUEUED * _PUSH_BYTES:
            self.beyond.append(f"{client.me.name} keeps {client.replay.bytes} bytes of pushes")
        for server, known in enumerate(client.servers):
            if max(len(known.waiting), len(known.repeated)) > _MOST_REQUESTS:
                self.beyond.append(f"{client.me.name} keeps requests to server {server}")


class WatchedClient(Client):
    """A client that notes its waits."""

    def watch(self, waits: Waits, sizes: Sizes, unsaved: list[str], scheduler: Scheduler) -> None:
        self._waits, self._sizes, self._scheduler = waits, sizes, scheduler
        self._unsaved_by, self._depth = unsaved, 0

    def close(self) -> None:
        super().close()
        if self.unsaved:
            self._unsaved_by.append(self.me.name)

    def wait(
        self,
        requests: Sequence[PendingRequest],
        timeout_s: float | None = None,
        error: type[JaxfleetError] = PeerLostError,
    ) -> None:
        """Waits; a recovery may wait within it, once for each server."""
        began_s, self._depth = self._scheduler.now_s, self._depth + 1
        try:
            super().wait(requests, timeout_s, error)
        finally:
            self._depth -= 1
            limit_s = max(timeout_s or 0.0, self._watch.longest_s)
            limit_s = limit_s * (1 + len(self.servers)) + self._waits.excused_s + 1.0
            took_s = self._scheduler.now_s - began_s
            if not self._depth and took_s > limit_s:
                what = f"{self.me.name} waited {took_s:.1f} s instead of {limit_s:.1f} s"
                self._waits.late.append(what)
            self._sizes.look_at_client(self)

    def move_away(self) -> None:
        """Leaves for other servers; recoveries may wait within it, one for each server."""
        began_s = self._scheduler.now_s
        try:
            super().move_away()
        finally:
            limit_s = self._watch.longest_s * (1 + len(self.servers)) + self._waits.excused_s + 1.0
            took_s = self._scheduler.now_s - began_s
            if took_s > limit_s:
                what = f"{self.me.name} moved for {took_s:.1f} s instead of {limit_s:.1f} s"
                self._waits.late.append(what)

"""Byes of a trainer, said until each server has answered, or is not there any more."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from jaxfleet.errors import PeerLostError
from jaxfleet.observability import LongWait
from jaxfleet.ps.client.heartbeat import Heartbeat
from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.ps.client.request_sender import RequestSender
from jaxfleet.transport.messages import Kind

_BYE_S = 2.0
_MOST_LOST = 2  # times `lost_after_s` that byes are repeated to a server that lives
_POLL_S = 0.25
_AFTER_S = 0.5  # after which a heartbeat is no older than what came on another connection


@dataclass(frozen=True)
class ByeSender:
    """Says bye to the servers.

    A server without a bye waits for its trainer as for one that was lost. One that has all byes
    ends, and its answer may be lost, so byes are repeated only while heartbeats show that it lives.

    Attributes:
        wait: receives until requests are answered, or some seconds have passed.
        receive: receives for some seconds, and sends again what is due.
    """

    outbox: RequestSender
    heartbeat: Heartbeat | None
    clock: Callable[[], float]
    wait: Callable[[Sequence[PendingRequest], float], None]
    receive: Callable[[float], None]

    def send(self) -> None:
        """Says bye; still waits for a server that may be restarted.

        Otherwise the restarted server would wait for trainers that ended long ago.
        """
        began, timeouts = self.clock(), self.outbox.timeouts
        byes = [self.outbox.request(at, Kind.BYE) for at in range(len(self.outbox.servers))]
        limit_s, returns_s = _BYE_S, timeouts.server_return_s
        if returns_s:
            limit_s += timeouts.lost_after_s + returns_s
        with suppress(PeerLostError):
            self.wait(byes, limit_s)
        until = self.clock() + _MOST_LOST * timeouts.lost_after_s
        while self.clock() < until and any(self._is_awaited(bye, began) for bye in byes):
            self.receive(_POLL_S)

    def _is_awaited(self, bye: PendingRequest, since: float) -> bool:
        """Whether a server has not answered, and has sent heartbeats until just now."""
        if bye.is_done or self.heartbeat is None:
            return False
        heard = self.heartbeat.pulse(bye.server).last_heard_s
        return heard is not None and heard > max(since, self.clock() - _BYE_S)


@dataclass(frozen=True)
class MoveSender:
    """Says bye to servers from which all trainers move to others.

    They answer when all trainers have said it. Then they end, or begin anew and know none of
    them: nothing is repeated to one that is not what it was.

    Attributes:
        receive: receives for some seconds, without returning to servers that were started again.
        return_to: says hello again to a server that is what it was, and repeats what it lacks.
    """

    outbox: RequestSender
    heartbeat: Heartbeat | None
    clock: Callable[[], float]
    receive: Callable[[float], None]
    return_to: Callable[[int], None]

    def send(self, limit_s: float) -> list[PendingRequest]:
        """Says bye; returns the byes that servers have not taken after so many seconds."""
        outbox, until, wait = self.outbox, self.clock() + limit_s, LongWait(self.clock)
        byes = [outbox.request(at, Kind.BYE, body={"moves": True})
                for at in range(len(outbox.servers))]  # fmt: skip
        strange: dict[int, float] = {}  # since when servers do not know this trainer
        while (left := [bye for bye in byes if not self._is_over(bye)]) and self.clock() < until:
            self.receive(_POLL_S)
            wait.look(lambda: f"{outbox.me.name} waits for the others, to move to other servers")
            for bye in left:
                self._return_if_same(bye.server, strange)
        return left

    def _is_over(self, bye: PendingRequest) -> bool:
        if bye.is_done or self.heartbeat is None:
            return bye.is_done or not self.outbox.servers[bye.server].is_level
        lost_s = self.outbox.timeouts.lost_after_s
        return self._is_new(bye.server) or self.heartbeat.silent_s(bye.server) > lost_s

    def _is_new(self, server: int) -> bool:
        assert self.heartbeat is not None
        return self.outbox.servers[server].is_unknown(self.heartbeat.pulse(server))

    def _return_if_same(self, server: int, strange: dict[int, float]) -> None:
        """Returns to a server that lost its connection; its heartbeats show that it did not end."""
        if self.outbox.servers[server].is_level or self.heartbeat is None:
            strange.pop(server, None)
            return
        since = strange.setdefault(server, self.clock())
        heard = self.heartbeat.pulse(server).last_heard_s
        if heard is not None and heard > since + _AFTER_S and not self._is_new(server):
            self.return_to(server)

"""Byes of a trainer, said until each server has answered, or is not there any more."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from jaxfleet.errors import PeerLostError, ProgramError
from jaxfleet.observability import LongWait
from jaxfleet.ps.client.heartbeat import Heartbeat
from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.ps.client.request_sender import RequestSender
from jaxfleet.ps.membership import MembershipChangedError
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
    them: nothing is repeated to one that is not what it was. A server that was started again is
    what it was until one of them has answered: then no trainer needs its old state any more.

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
        left, moved_at = byes, math.inf
        while left and self.clock() < min(until, moved_at + outbox.timeouts.lost_after_s):
            self.receive(_POLL_S)
            wait.look(lambda: f"{outbox.me.name} waits for the others, to move to other servers")
            left = [bye for bye in left if self._returned_if_same(bye.server, strange)]
            if any(bye.is_done or self._has_begun_anew(bye.server) for bye in byes):
                moved_at = min(moved_at, self.clock())  # nobody needs what a server was
            have_moved = moved_at < math.inf
            left = [bye for bye in left if not self._is_over(bye, have_moved=have_moved)]
        return left if moved_at == math.inf else []

    def _is_over(self, bye: PendingRequest, *, have_moved: bool) -> bool:
        if bye.is_done or self.heartbeat is None:
            return bye.is_done or not self.outbox.servers[bye.server].is_level
        timeouts = self.outbox.timeouts
        limit_s = timeouts.lost_after_s + (0.0 if have_moved else timeouts.server_return_s)
        if self.heartbeat.silent_s(bye.server) > limit_s:
            return True
        return self._is_new(bye.server) and (have_moved or self._has_begun_anew(bye.server))

    def _is_new(self, server: int) -> bool:
        """Whether a server has not greeted this trainer since it was started or begun anew."""
        assert self.heartbeat is not None
        return self.outbox.servers[server].is_unknown(self.heartbeat.pulse(server))

    def _has_begun_anew(self, server: int) -> bool:
        """Whether a server has ended what it was, after the byes of all trainers."""
        if self.heartbeat is None or not self._is_new(server):
            return False
        pulse, epoch = self.heartbeat.pulse(server), self.outbox.me.membership.epoch
        has_new = pulse.membership is not None and pulse.membership.epoch > epoch
        return has_new or pulse.step < 0

    def _returned_if_same(self, server: int, strange: dict[int, float]) -> bool:
        """Returns to a server that does not know this trainer, and is what it was.

        Its heartbeats show that it did not end. Returns False if it has begun anew meanwhile.
        """
        if self.outbox.servers[server].is_level or self.heartbeat is None:
            strange.pop(server, None)
            return True
        since = strange.setdefault(server, self.clock())
        heard = self.heartbeat.pulse(server).last_heard_s
        if heard is None or heard <= since + _AFTER_S or self._has_begun_anew(server):
            return True
        try:
            self.return_to(server)
        except (MembershipChangedError, ProgramError):
            return False  # with others that have moved
        return True

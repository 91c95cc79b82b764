"""Byes of a trainer, said until each server has answered, or is not there any more."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from jaxfleet.errors import PeerLostError
from jaxfleet.observability import LongWait
from jaxfleet.ps.client.heartbeat import Heartbeat
from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.ps.client.request_sender import RequestSender
from jaxfleet.ps.client.server_recovery import ServerRecovery
from jaxfleet.ps.membership import MembershipChangedError
from jaxfleet.transport.messages import Kind

_BYE_S = 2.0
_MOST_LOST = 2  # times `lost_after_s` that a server that lives is given to answer
_POLL_S = 0.25
_FULL_S, _AGAIN_S = 10.0, 1.0  # for which a server without space is asked to save, and how often
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
    wait: Callable[[Sequence[PendingRequest], float | None], None]
    receive: Callable[[float], None]

    def save(self, *, all_lack: bool) -> list[int]:
        """Has servers save the pushes that this trainer can no longer replay after its bye.

        With `all_lack`, no checkpoint has any. Returns the servers without space for one.
        """
        replays = [(at, known.replay) for at, known in enumerate(self.outbox.servers)]
        left = [at for at, log in replays
                if log.until_saved and (all_lack or log.first_step() is not None)]  # fmt: skip
        until = self.clock() + _FULL_S
        while left:
            saves = [self.outbox.request(server, Kind.SAVE) for server in left]
            self.wait(saves, None)
            left = [save.server for save in saves
                    if save.answer is not None and save.answer.body.get("is_full")]  # fmt: skip
            again = self.clock() + _AGAIN_S
            if again >= until:
                break
            while left and self.clock() < again:
                self.receive(_POLL_S)
        return left

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


class _MovedError(Exception):
    """The servers are not what they were: others have moved."""


@dataclass
class MoveSender:
    """Says bye to servers from which all trainers move to others.

    They answer when all trainers have said it. Then they end, or begin anew and know none of
    them: nothing is repeated to one that is not what it was. A server that was started again is
    what it was until one of them has answered: then all trainers have said bye, and the state that
    they have saved is enough.

    Attributes:
        receive: receives for some seconds, without returning to servers that were started again.
        is_lost: whether a server has been silent for longer than a restart takes.
    """

    outbox: RequestSender
    heartbeat: Heartbeat | None
    clock: Callable[[], float]
    receive: Callable[[float], None]
    is_lost: Callable[[int], bool]
    _byes: list[PendingRequest] = field(default_factory=list)
    _until: float = 0.0
    # Since when servers do not know this trainer.
    _strange: dict[int, float] = field(default_factory=dict)

    def send(self, limit_s: float) -> list[PendingRequest]:
        """Says bye; returns the byes that servers have not taken after so many seconds."""
        outbox, wait = self.outbox, LongWait(self.clock)
        self._until = self.clock() + limit_s
        self._byes = left = [outbox.request(at, Kind.BYE, body={"moves": True})
                             for at in range(len(outbox.servers))]  # fmt: skip
        while left and self.clock() < self._until and not self._have_moved():
            self.receive(_POLL_S)
            wait.look(lambda: f"{outbox.me.name} waits for the others, to move to other servers")
            with suppress(_MovedError):
                self._return()
            if self.heartbeat is None:  # no sign shows whether a stranger is what it was
                left = [bye for bye in left if outbox.servers[bye.server].is_level]
            if any(self.is_lost(bye.server) for bye in left):
                return left
        if not self._have_moved():
            return left
        # Most answer at once. One that does not hears of it in the next epoch, or from the launch.
        self._hurry()
        with suppress(PeerLostError):  # it misses the bye of a trainer that has moved
            while self.clock() < self._until and any(self._answers(bye) for bye in left):
                self.receive(_POLL_S)
                with suppress(_MovedError):
                    self._return()
        return []

    def _hurry(self) -> None:
        """Limits further waits, as all trainers have said bye to some server."""
        soon = self.clock() + _MOST_LOST * self.outbox.timeouts.lost_after_s
        self._until = min(self._until, soon)

    def _have_moved(self) -> bool:
        """Whether a server has answered, or begun anew: all trainers have said bye."""
        return any(bye.is_done or self._has_begun_anew(bye.server) for bye in self._byes)

    def _answers(self, bye: PendingRequest) -> bool:
        """Whether a server may answer that is still what it was.

        One that does not know this trainer, since a connection was lost, does so as long as its
        heartbeats show that it has not ended.
        """
        server, known = bye.server, self.outbox.servers[bye.server]
        if bye.is_done or self._is_new(server):
            return False
        if known.is_level or self.heartbeat is None:
            return known.is_level
        heard = self.heartbeat.pulse(server).last_heard_s
        heard_s = max(self._strange.get(server, -math.inf), -math.inf if heard is None else heard)
        return self.clock() - heard_s < _BYE_S

    def _is_new(self, server: int) -> bool:
        """Whether a server has not greeted this trainer since it was started or begun anew."""
        if self.heartbeat is None:
            return False
        return self.outbox.servers[server].is_unknown(self.heartbeat.pulse(server))

    def _has_begun_anew(self, server: int) -> bool:
        """Whether a server has ended what it was, after the byes of all trainers."""
        if self.heartbeat is None or not self._is_new(server):
            return False
        pulse, epoch = self.heartbeat.pulse(server), self.outbox.me.membership.epoch
        has_new = pulse.membership is not None and pulse.membership.epoch > epoch
        return has_new or pulse.step < 0

    def _return(self) -> None:
        """Says hello again to servers that do not know this trainer, and repeats what they lack.

        Their heartbeats show that they did not end.

        Raises:
            _MovedError: the others have moved meanwhile.
        """
        for server, known in enumerate(self.outbox.servers):
            if known.is_level or self.heartbeat is None:
                self._strange.pop(server, None)
                continue
            since = self._strange.setdefault(server, self.clock())
            heard = self.heartbeat.pulse(server).last_heard_s
            if known.is_returning or heard is None or heard <= since + _AFTER_S:
                continue
            try:
                ServerRecovery(self.outbox, self._wait).bring_level(server)
            except MembershipChangedError as change:
                if change.begun_at != server:
                    raise
                raise _MovedError from None

    def _wait(self, requests: Sequence[PendingRequest]) -> None:
        servers = {request.server for request in requests}
        while not all(request.is_done for request in requests):
            if self._have_moved():
                self._hurry()
                if not any(self._answers(bye) for bye in self._byes if bye.server in servers):
                    raise _MovedError
            if self.clock() >= self._until:
                raise _MovedError
            self.receive(_POLL_S)
            self._return()

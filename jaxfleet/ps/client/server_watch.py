"""Detection of lost and late servers."""

from collections.abc import Sequence

from jaxfleet.errors import JaxfleetError, PeerLostError
from jaxfleet.ps.client.heartbeat import Heartbeat, Pulse
from jaxfleet.ps.client.pending_request import (
    PendingRequest,
    describe_wait,
    lost_server_error,
    timeout_error,
)
from jaxfleet.ps.client.request_sender import RequestSender


class ServerWatch:
    """Distinguishes lost servers from late ones.

    Args:
        client: of the servers.
        heartbeat: detects lost ones; without one, none is lost.
    """

    def __init__(self, client: RequestSender, heartbeat: Heartbeat | None) -> None:
        self._client, self._heartbeat = client, heartbeat

    @property
    def longest_s(self) -> float:
        """How long a request may take: longer than servers wait, whose error names the peer."""
        timeouts = self._client.timeouts
        returns_s = timeouts.server_return_s + (timeouts.trainer_return_s or 0.0)
        return timeouts.step_timeout_s * 1.1 + 5 + returns_s

    @property
    def _silence_s(self) -> float:
        return self._client.timeouts.lost_after_s + self._client.timeouts.server_return_s

    def is_silent(self, server: int) -> bool:
        """Whether a server is lost: it has sent no heartbeat for longer than a restart takes."""
        heartbeat = self._heartbeat
        return heartbeat is not None and heartbeat.silent_s(server) > self._silence_s

    def lost(self, server: int, requests: Sequence[PendingRequest]) -> PeerLostError:
        """Returns the error of a server that is lost while requests wait."""
        doing = "" if self._heartbeat is None else self._heartbeat.pulse(server).doing
        client = self._client
        return lost_server_error(
            client.me, server, requests, step=client.step, limit_s=self._silence_s, doing=doing
        )

    def late(
        self, requests: Sequence[PendingRequest], limit_s: float, error: type[JaxfleetError]
    ) -> JaxfleetError:
        """Returns the error of the first of the requests that was not answered in time."""
        request = next(request for request in requests if not request.is_done)
        return timeout_error(self._client.me, request, limit_s, error, self._pulse(request))

    def describe(self, requests: Sequence[PendingRequest], limit_s: float) -> str:
        """Describes a wait for the answers of requests, which ends after `limit_s` seconds."""
        me = self._client.me
        waiting = [request for request in requests if not request.is_done]
        if not waiting:
            return f"{me.name} waited at step {self._client.step}"
        what = describe_wait(me, waiting[0], len(waiting) - 1, self._pulse(waiting[0]))
        option = " (connect_s)" if limit_s == self._client.timeouts.connect_s else ""
        return f"{what}; {me.name} gives up after {limit_s:.0f} s{option}"

    def _pulse(self, request: PendingRequest) -> Pulse | None:
        return self._heartbeat.pulse(request.server) if self._heartbeat is not None else None

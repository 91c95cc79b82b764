"""Waits until servers, or the other ranks, listen."""

import socket
import sys
import time
from collections.abc import Sequence

from jaxfleet.errors import ConnectError

_CONNECT_S = 2.0  # fluid's
_PAUSE_S = 0.5
_DEADLINE_S = 300.0  # fluid's job waits for ever; a wrong endpoint should be heard of


def wait_server_ready(endpoints: Sequence[str], deadline_s: float = _DEADLINE_S) -> None:
    """Waits until something listens at each endpoint.

    Args:
        endpoints: `host:port` each.
        deadline_s: how long, in seconds.

    Raises:
        ConnectError: one of them did not in that time.
    """
    _wait("servers", endpoints, deadline_s, "start the servers, or look why they ended")


def wait_ranks_ready(endpoints: Sequence[str], deadline_s: float = _DEADLINE_S) -> None:
    """Waits until the ranks of a collective job listen, as rank 0 does where `wait_port` is set.

    Args:
        endpoints: `host:port` each, of the others.
        deadline_s: how long, in seconds.

    Raises:
        ConnectError: one of them did not in that time.
    """
    hint = "ranks here are devices of one process, and none listens: set config.wait_port = False"
    _wait("the other ranks", endpoints, deadline_s, hint)


def _wait(who: str, endpoints: Sequence[str], deadline_s: float, hint: str) -> None:
    end = time.monotonic() + deadline_s
    waiting = _silent(endpoints)
    if waiting:
        shown = f"waiting up to {deadline_s:g} s for {who}: {', '.join(waiting)}"
        sys.stderr.write(f"{shown} ({hint})\n")
    while waiting:
        if time.monotonic() > end:
            what = f"{who}: nothing listens at {', '.join(waiting)} after {deadline_s:g} s"
            raise ConnectError(what, hint=hint)
        time.sleep(_PAUSE_S)
        waiting = _silent(waiting)


def _silent(endpoints: Sequence[str]) -> list[str]:
    return [endpoint for endpoint in endpoints if not _listens(endpoint)]


def _listens(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_S):
            return True
    except OSError:
        return False

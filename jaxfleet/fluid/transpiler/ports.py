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
    who, hint = "servers", "start the servers, or look why they ended"
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

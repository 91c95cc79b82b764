"""Carries jax's lines to its coordinator, so that the coordinator's end does not end this process.

jax runs its coordinator inside rank 0. When that process goes, the connection to it breaks, and
jax aborts every other process at once, before anybody could say who was lost. Behind a relay the
line only falls silent, which jax bears for as long as it was told to.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from jaxfleet.group.peer_user import peer_user

_CHUNK = 1 << 16
_AGAIN_S = 0.05
_LOOKS = 3  # at the list of connections


class Relay:
    """Listens on this machine, and carries what comes to another address, and back.

    It carries for this user alone: others would reach the coordinator in the name of this machine,
    and have a connection there and two threads here for each of theirs.

    Args:
        host: where to.
        port: where to.
        connect_s: how long the other end may take to be there.
    """

    def __init__(self, host: str, port: int, *, connect_s: float) -> None:
        self._to, self._connect_s = (host, port), connect_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        _start(self._accept)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # no descriptor is left, for now
                time.sleep(_AGAIN_S)
                continue
            if _is_own(near):
                _start(self._carry, near)
            else:
                near.close()

    def _carry(self, near: socket.socket) -> None:
        far = self._connect()
        if far is None:
            near.close()
            return
        _start(_back, far, near)
        while chunk := _received(near):
            with suppress(OSError):
                far.sendall(chunk)
        # jax closed its line, so nobody is left who could take an end for a failure.
        for each in (far, near):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _connect(self) -> socket.socket | None:
        until = time.monotonic() + self._connect_s
        while time.monotonic() < until:
            with suppress(OSError):
                far = socket.create_connection(self._to, timeout=self._connect_s)
                far.settimeout(None)
                return far
            time.sleep(_AGAIN_S)
        return None


def _is_own(near: socket.socket) -> bool:
    """Whether a connection is of this user, or of a system that does not list connections."""
    with suppress(OSError):
        for _ in range(_LOOKS):  # a list that changes while it is read may lack an entry
            if (user := peer_user(near)) in {None, os.getuid()}:
                return True
            if user != -1:
                return False
            time.sleep(_AGAIN_S)
    return False


def _back(far: socket.socket, near: socket.socket) -> None:
    """Carries what comes back; when it ends, `near` stays open and silent, as said above."""
    with suppress(OSError):
        while chunk := _received(far):
            near.sendall(chunk)


def _received(source: socket.socket) -> bytes:
    """Returns what came, or nothing once no more can come."""
    with suppress(OSError):
        return source.recv(_CHUNK)
    return b""


def _start(run: Callable[..., None], *args: socket.socket) -> None:
    threading.Thread(target=run, args=args, name="jaxfleet-relay", daemon=True).start()

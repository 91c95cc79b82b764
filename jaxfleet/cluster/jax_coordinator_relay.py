"""Relay to JAX's coordinator, so that its end does not end this process.

jax runs its coordinator inside rank 0. When that process dies, the connection breaks, and jax
aborts every other process at once, before any of them can report which rank was lost. Behind a
relay the connection only falls silent, which jax tolerates up to its configured timeout.
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_MAPPED = "0000000000000000FFFF0000"  # prefix of an IPv4 address on an IPv6 socket, as gRPC uses
_LOCAL, _REMOTE, _USER, _INODE = 1, 2, 7, 9  # columns
_CLOSED = "0"  # the inode of an end without an owner, listed under user root


def peer_user(line: socket.socket) -> int | None:
    """Returns the user id of the peer; None if the system does not list its connections.

    The kernel lists both ends of a loopback connection with their owners, whether or not an end
    has shut down its sending side. The result is -1 if the other end is not listed with an owner:
    it has been closed, or belongs to another machine.
    """
    here, there = _name(line.getsockname()), _name(line.getpeername())
    tables = [rows for table in _TABLES if (rows := _rows(table)) is not None]
    if not tables:
        return None
    users = {
        (row[_LOCAL].removeprefix(_MAPPED), row[_REMOTE].removeprefix(_MAPPED)): int(row[_USER])
        for row in (each.split() for rows in tables for each in rows)
        if row[_INODE] != _CLOSED
    }
    return users.get((there, here), -1)


def _rows(table: Path) -> list[str] | None:
    try:
        return table.read_text().splitlines()[1:]
    except OSError:
        return None


def _name(address: tuple[str, int]) -> str:
    """Returns an address as in the kernel's table: in the machine's byte order."""
    host, port = address
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"


_CHUNK = 1 << 16
_AGAIN_S = 0.05
_LOOKS = 3  # reads of the connection table


class Relay:
    """Forwards connections on this machine to another address, in both directions.

    It serves only this user: others would reach the coordinator in the name of this machine, and
    each of their connections would cost one connection and two threads here.
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
            except OSError:  # out of descriptors, for now
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
        # jax closed its connection, so nothing is left that could mistake an end for a failure.
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
    """Whether a connection is of this user, or the system does not list connections."""
    with suppress(OSError):
        for _ in range(_LOOKS):  # a table that changes during the read may lack an entry
            if (user := peer_user(near)) in {None, os.getuid()}:
                return True
            if user != -1:
                return False
            time.sleep(_AGAIN_S)
    return False


def _back(far: socket.socket, near: socket.socket) -> None:
    """Forwards the replies; when they end, `near` stays open and silent, as described above."""
    with suppress(OSError):
        while chunk := _received(far):
            near.sendall(chunk)


def _received(source: socket.socket) -> bytes:
    with suppress(OSError):
        return source.recv(_CHUNK)
    return b""


def _start(run: Callable[..., None], *args: socket.socket) -> None:
    threading.Thread(target=run, args=args, name="jaxfleet-relay", daemon=True).start()

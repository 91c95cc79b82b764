"""Limits of connections that have not proved possession of the job's secret.

ZeroMQ limits the duration of a handshake and nothing else: a peer without the secret could open as
many connections as there are descriptors, and make each buffer a frame of the largest size. The
doorway counts such connections, and cuts them if they are too many or send too much.

The progress of a handshake is visible in the byte counts of the kernel (`TCP_INFO`): a CURVE server
answers the 64 bytes of a greeting with as many, and sends more only to a peer that has the server's
public key, which is derived from the secret. On systems without these counts only the number of
connections is limited.

Without a secret a handshake proves nothing. A connection then counts until the server says that a
message on it was of the job: a hello that was accepted, or a heartbeat of who said one.
"""

import os
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

_TCP_INFO = 11
_COUNTED = struct.Struct("<QQ")  # bytes acknowledged and received, from Linux 4.1 on
_COUNTED_AT = 120
_GREETED = 72  # bytes sent: the 64 of a greeting, and the beginning of another command


@dataclass(frozen=True, kw_only=True)
class DoorLimits:
    """Limits of connections that have not proved possession of the secret.

    Attributes:
        connections: the maximum in total; if another is accepted, the oldest is cut.
        of_an_address: the maximum of one address.
        received_bytes: the maximum that one may send.
        longest_s: when the limits stop to apply, since ZeroMQ then ends the handshake itself.
    """

    connections: int = 64
    of_an_address: int = 16
    received_bytes: int = 4096
    longest_s: float = 10.0


WITHOUT_SECRET = DoorLimits(
    connections=256, of_an_address=64, received_bytes=2 << 20, longest_s=30.0
)  # all trainers of a machine may come at once, and a hello brings the text of a program


@dataclass(frozen=True)
class _Stranger:
    """An unauthenticated connection: a second descriptor of it, its address, and when it came."""

    line: socket.socket
    address: str
    since: float


@dataclass
class Doorway:
    """The unauthenticated connections of a listener.

    Attributes:
        limits: how much they may hold.
        by_handshake: a handshake proves it; else connections are cut when they stay too long.
        clock: the time in seconds.
        cut: how many were cut.
    """

    limits: DoorLimits
    by_handshake: bool = True
    clock: Callable[[], float] = time.monotonic
    cut: int = 0
    _strangers: dict[int, _Stranger] = field(default_factory=dict)  # by their descriptor, in order

    def __len__(self) -> int:
        return len(self._strangers)

    @property
    def addresses(self) -> list[str]:
        """The addresses of connections that have proved nothing yet."""
        return list(dict.fromkeys(one.address for one in self._strangers.values()))

    def accepted(self, fd: int) -> None:
        """Adds a connection; cuts the oldest if there are too many."""
        self.left(fd)  # the number was another's before
        stranger = self._stranger(fd)
        if stranger is None:
            return
        self._strangers[fd] = stranger
        if len(self._strangers) > self.limits.of_an_address:
            self.look()
        counts = Counter(one.address for one in self._strangers.values())
        crowded = counts[stranger.address] > self.limits.of_an_address
        if crowded or len(self._strangers) > self.limits.connections:
            self._cut(next(
                at for at, one in self._strangers.items()
                if not crowded or one.address == stranger.address
            ))  # fmt: skip

    def left(self, fd: int) -> None:
        """Removes a connection that has ended."""
        if (stranger := self._strangers.pop(fd, None)) is not None:
            stranger.line.close()

    def may_hold(self, fd: int) -> bool:
        """Whether a connection counts; any thread may ask."""
        return fd in self._strangers

    def look(self) -> None:
        """Removes authenticated connections, and cuts those that sent too much."""
        for fd, stranger in list(self._strangers.items()):
            sent, received = _counted(stranger.line)
            is_late = self.clock() - stranger.since > self.limits.longest_s
            if self.by_handshake and (sent >= _GREETED or is_late):
                self.left(fd)
            elif received > self.limits.received_bytes or is_late:
                self._cut(fd)

    def close(self) -> None:
        """Removes all connections without cutting them."""
        for fd in list(self._strangers):
            self.left(fd)

    def _cut(self, fd: int) -> None:
        """Ends a connection; ZeroMQ notices, and closes it."""
        self.cut += 1
        with suppress(OSError):  # it has ended by itself
            self._strangers[fd].line.shutdown(socket.SHUT_RDWR)
        self.left(fd)

    def _stranger(self, fd: int) -> _Stranger | None:
        """Returns a new connection, None if it has ended or is a Unix socket."""
        try:
            copy = os.dup(fd)
        except OSError:
            return None
        try:
            line = socket.socket(fileno=copy)
        except OSError:  # the number is a file's by now
            os.close(copy)
            return None
        try:
            if line.family != socket.AF_UNIX:  # ZeroMQ has checked the user of those
                return _Stranger(line, str(line.getpeername()[0]), self.clock())
        except OSError:
            pass
        line.close()
        return None


def _counted(line: socket.socket) -> tuple[int, int]:
    """Returns how many bytes were acknowledged and received, 0 without the kernel's counts."""
    if not sys.platform.startswith("linux"):
        return 0, 0
    try:
        info = line.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _COUNTED_AT + _COUNTED.size)
    except OSError:
        return 0, 0
    if len(info) < _COUNTED_AT + _COUNTED.size:
        return 0, 0
    sent, received = _COUNTED.unpack_from(info, _COUNTED_AT)
    return sent, received

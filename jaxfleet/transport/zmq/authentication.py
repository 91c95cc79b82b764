"""Authentication of a listener's peers, and limits on connections that are not authenticated.

ZeroMQ limits only the duration of a handshake: a peer without the secret could open as many
connections as there are descriptors, and make each buffer a frame of the maximum size.
`AdmissionControl` counts such connections, and cuts them if they are too many or send too much.

The progress of a handshake is visible in the byte counts of the kernel (`TCP_INFO`): a CURVE server
answers the 64 bytes of a greeting with as many, and sends more only to a peer that has the server's
public key, which is derived from the secret. On systems without these counts only the number of
connections is limited.

Without a secret a handshake proves nothing. A connection then counts until the server reports that
a message on it belonged to the job: an accepted hello, or a heartbeat of a trainer that sent one.
"""

import os
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import zmq
import zmq.utils.z85
from zmq.utils.monitor import recv_monitor_message

from jaxfleet.observability.notices import alert
from jaxfleet.transport.secret import Keys

_TCP_INFO = 11
_COUNTED = struct.Struct("<QQ")  # bytes acknowledged and received, from Linux 4.1 on
_COUNTED_AT = 120
_GREETED = 72  # bytes sent: the 64 of a greeting, and the beginning of another command


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """Limits on connections that have not proved possession of the secret.

    Attributes:
        connections: maximum in total; beyond it, the oldest is cut.
        of_an_address: maximum per address.
        received_bytes: maximum that one connection may send.
        longest_s: age at which the limits cease to apply, since ZeroMQ then ends the handshake
            itself.
    """

    connections: int = 64
    of_an_address: int = 16
    received_bytes: int = 4096
    longest_s: float = 10.0


LIMITS_WITHOUT_SECRET = AdmissionLimits(
    connections=256, of_an_address=64, received_bytes=2 << 20, longest_s=30.0
)  # all trainers of a machine may connect at once, and a hello carries a program's text


@dataclass(frozen=True)
class _Unauthenticated:
    """An unauthenticated connection: a duplicate descriptor, its address, and its accept time."""

    line: socket.socket
    address: str
    since: float


@dataclass
class AdmissionControl:
    """The unauthenticated connections of a listener.

    A completed handshake authenticates, or (not `by_handshake`) connections are cut after a time.
    """

    limits: AdmissionLimits
    by_handshake: bool = True
    clock: Callable[[], float] = time.monotonic
    cut: int = 0
    # By descriptor, in order of arrival.
    _strangers: dict[int, _Unauthenticated] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._strangers)

    @property
    def addresses(self) -> list[str]:
        return list(dict.fromkeys(one.address for one in self._strangers.values()))

    def accepted(self, fd: int) -> None:
        """Adds a connection; cuts the oldest if there are too many."""
        self.left(fd)  # a previous connection may have had this number
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
        if (stranger := self._strangers.pop(fd, None)) is not None:
            stranger.line.close()

    def may_hold(self, fd: int) -> bool:
        """Whether a connection counts; safe from any thread."""
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

    def _stranger(self, fd: int) -> _Unauthenticated | None:
        """Returns a new connection, None if it has ended or is a Unix socket."""
        try:
            copy = os.dup(fd)
        except OSError:
            return None
        try:
            line = socket.socket(fileno=copy)
        except OSError:  # the number now belongs to a file
            os.close(copy)
            return None
        try:
            if line.family != socket.AF_UNIX:  # ZeroMQ checks the user of Unix sockets
                return _Unauthenticated(line, str(line.getpeername()[0]), self.clock())
        except OSError:
            pass
        line.close()
        return None


def _counted(line: socket.socket) -> tuple[int, int]:
    """Returns the acknowledged and received byte counts, 0 without the kernel's counts."""
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


_ZAP = "inproc://zeromq.zap.01"  # address of ZeroMQ's authentication requests
_EVENTS = "inproc://jaxfleet.door"
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_LOG_AGAIN_S = 60.0
_SHOWN_ADDRESSES = 3  # addresses
_MOST_TRUSTED = 1024  # at a time
_MOST_ENDED = 4096  # at a time; beyond, ends of the oldest are not noticed
_LOOK_MS = 50  # polling interval while there are unauthenticated connections


class Authenticator:
    """Admits peers with the job's secret, or without one peers using ZeroMQ's protocol since 2013.

    A peer with an older protocol that sends its name while the socket closes would crash this
    process (libzmq 4.3.5, zmtp_engine.cpp:422); libzmq rejects it if authentication is enabled. It
    runs in its own thread, because the serving thread may be busy for longer than a handshake
    waits.

    Args:
        router: the listener's socket, not bound yet.

    Attributes:
        ended: descriptors of connections that have ended, until they are taken.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        router: "zmq.Socket[bytes]",
        keys: Keys | None,
        limits: AdmissionLimits,
    ) -> None:
        self._doorway = AdmissionControl(limits, keys is not None)
        self._trusted = deque[int](maxlen=_MOST_TRUSTED)
        self.ended = deque[int](maxlen=_MOST_ENDED)
        self._where, self._refused, self._log_at = "", 0, 0.0
        self._wanted = [b"NULL"]
        if keys is not None:
            self._wanted = [b"CURVE", zmq.utils.z85.decode(keys.client_public)]
        router.setsockopt(zmq.ZAP_DOMAIN, b"jaxfleet")
        self._asked = context.socket(zmq.REP)
        self._asked.setsockopt(zmq.LINGER, 0)
        self._asked.bind(_ZAP)
        router.monitor(_EVENTS, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILED)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.setsockopt(zmq.RCVHWM, 0)  # unlimited, or ZeroMQ's own thread would block
        self._events.connect(_EVENTS)
        threading.Thread(target=self._run, name="jaxfleet-door", daemon=True).start()

    def listens_at(self, endpoint: str) -> None:
        self._where = endpoint

    def trust(self, descriptor: int) -> None:
        """Marks a connection's peer as a participant in the job."""
        if self._doorway.may_hold(descriptor):
            self._trusted.append(descriptor)

    @property
    def cut(self) -> int:
        """Number of connections cut before they authenticated."""
        return self._doorway.cut

    def _run(self) -> None:
        """Handles authentication and socket events until the context ends."""
        poller = zmq.Poller()
        poller.register(self._asked, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(_LOOK_MS if len(self._doorway) else None))
                # Events first: a descriptor's new connection is let in after the end of its last.
                while self._events.poll(0):
                    event = recv_monitor_message(self._events)
                    self._note(event["event"], event["value"])
                if self._asked in ready:
                    self._answer()
                while self._trusted:
                    self._doorway.left(self._trusted.popleft())
                self._doorway.look()
        except zmq.ZMQError:
            self._doorway.close()
            self._asked.close()
            self._events.close()

    def _answer(self) -> None:
        """Answers an authentication request of ZeroMQ (RFC 27)."""
        version, number, _, _, _, *shown = self._asked.recv_multipart()
        refused = (b"400", b"not this job's", b"")
        status = (b"200", b"OK", b"jaxfleet") if shown == self._wanted else refused
        self._asked.send_multipart([version, number, *status, b""])

    def _note(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._doorway.accepted(descriptor)
        elif event & _FAILED:
            self._log_refused()
        else:
            self._doorway.left(descriptor)
            self.ended.append(descriptor)

    def _log_refused(self) -> None:
        """Logs, at a limited rate, that a peer's handshake failed."""
        self._refused += 1
        if time.monotonic() >= self._log_at:
            self._log_at = time.monotonic() + _LOG_AGAIN_S
            peers = ", ".join(self._doorway.addresses[:_SHOWN_ADDRESSES]) or "this machine"
            alert(
                f"the listener at {self._where} refused a peer from {peers}, whose secret is not "
                f"this job's ({self._refused} connections so far): give both the same secret file"
            )

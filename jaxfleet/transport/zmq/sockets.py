"""ZeroMQ sockets: options, Unix sockets beside TCP ports, waiting, and closing.

A listener on the loopback address has a Unix socket beside its TCP port, and a client that finds it
connects there. The same bytes cost the kernel half as much (measured on loopback, 7.4 MB each way:
1.1 ms of a core instead of 2.3). Its name is abstract, so no file is left behind, and has the same
reach as the machine's loopback. Only Linux has such names.
"""

import math
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from jaxfleet.errors import ClosedError
from jaxfleet.transport.codec import Frame, FrameError, frame_bytes
from jaxfleet.transport.framing import WHOLE_BYTES
from jaxfleet.transport.secret import Keys

_CREDENTIALS = struct.Struct("iII")  # process, user, group
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})


def ipc_name(host: str, port: int) -> str | None:
    """Returns the name of the Unix socket beside a port, None if there is none."""
    if not sys.platform.startswith("linux") or host not in _LOOPBACK:
        return None
    return f"jaxfleet-{port}-{'6' if ':' in host else '4'}"


def ipc_address(name: str) -> str:
    """Returns the ZeroMQ address of a Unix socket."""
    return f"ipc://@{name}"


def listening_process(name: str) -> int | None:
    """Returns this user's process listening on the Unix socket, 0 if in another PID namespace.

    Returns None if there is no such process or it belongs to another user, whom a listener rejects.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(f"\0{name}")
        except OSError:
            return None
        found = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    if user != os.getuid():
        return None
    return int(pid) if _shares_pid_namespace(pid) else 0


def _shares_pid_namespace(pid: int) -> bool:
    """Whether a process number means the same process for the peer as here."""
    try:
        return Path(f"/proc/{pid}/ns/pid").samefile("/proc/self/ns/pid")
    except OSError:
        return False


# Sharing a frame with ZeroMQ's thread costs about 10 us, the same as copying 64 KB.
_COPY_BELOW_BYTES = 1 << 16
# Integers, since combining the flags for each part costs more than copying a small part.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
# Replies queued for one peer. A client has no such limit: its queue holds its own arrays.
_MOST_TO_SEND = 100_000
_KERNEL_BUFFER_BYTES = 1 << 20
_LONGEST_POLL_MS = 3_600_000
_MOST_RECEIVED = 256  # parts queued for reading; more wait at the sender


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Timeouts and intervals of a connection, in seconds.

    Attributes:
        reconnect_s: delay between attempts to connect.
        handshake_s: maximum duration of a handshake.
        probe_s: interval of TCP's keepalive probes on an idle connection, in whole seconds.
        half_open_s: maximum time without TCP's acknowledgment of data or of a probe.
        silent_s: maximum time without any message while a client waits for one; then it connects
            anew.
        doubles: wait twice as long each time, since the server may only be busy, or the line slow.
        linger_s: maximum wait for pending messages when closing.
    """

    reconnect_s: float = 0.1
    handshake_s: float = 10.0
    probe_s: float = 5.0
    half_open_s: float = 30.0
    silent_s: float = 30.0
    doubles: bool = True
    linger_s: float = 1.0


def make_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, timing: Timing
) -> "zmq.Socket[bytes]":
    """Returns a socket with bounded memory and timeouts.

    The kernel detects dead peers, not ZeroMQ's heartbeats, which abort the process (libzmq 4.3.5,
    stream_engine_base.cpp:310): of a connection whose queue is full it stops reading, and if the
    peer then ends, it forgets the connection's descriptor, but still writes a heartbeat, or the
    reply to one among the data read before.

    Measured on loopback with 2 cores: kernel buffers of 1 MB moved arrays of 1 and 8 MB up to 1.5
    times as fast as buffers of 4 MB or of the kernel's choice; one I/O thread did as well as two.
    """
    made = context.socket(kind)
    probe_s = max(1, round(timing.probe_s))
    made.setsockopt(zmq.SNDBUF, _KERNEL_BUFFER_BYTES)
    made.setsockopt(zmq.RCVBUF, _KERNEL_BUFFER_BYTES)
    made.copy_threshold = _COPY_BELOW_BYTES
    made.setsockopt(zmq.LINGER, _ms(timing.linger_s))
    made.setsockopt(zmq.SNDHWM, _MOST_TO_SEND if kind == zmq.ROUTER else 0)
    made.setsockopt(zmq.RCVHWM, _MOST_RECEIVED)
    made.setsockopt(zmq.MAXMSGSIZE, WHOLE_BYTES)
    made.setsockopt(zmq.IMMEDIATE, 0)
    made.setsockopt(zmq.TCP_KEEPALIVE, 1)
    made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, probe_s)
    made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, probe_s)
    made.setsockopt(zmq.TCP_KEEPALIVE_CNT, max(1, round(timing.half_open_s / probe_s)))
    made.setsockopt(zmq.TCP_MAXRT, _ms(timing.half_open_s))
    made.setsockopt(zmq.HANDSHAKE_IVL, _ms(timing.handshake_s))
    made.setsockopt(zmq.RECONNECT_IVL, _ms(timing.reconnect_s))
    made.setsockopt(zmq.RECONNECT_IVL_MAX, 0)  # constant delay, without backoff
    made.setsockopt(zmq.CONNECT_TIMEOUT, _ms(timing.handshake_s))
    return made


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def use_keys(made: "zmq.Socket[bytes]", keys: Keys, *, server: bool) -> None:
    """Restricts a socket to peers with the same secret."""
    if server:
        made.setsockopt(zmq.CURVE_SERVER, 1)
        made.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)
        return
    made.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    made.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
    made.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)


def send_parts(made: "zmq.Socket[bytes]", parts: Sequence[Frame]) -> None:
    """Sends one multipart message without blocking; raises zmq.Again if the queue is full."""
    last = len(parts) - 1
    for place, part in enumerate(parts):
        flags = _NOBLOCK if place == last else _NOBLOCK_MORE
        made.send(part, flags, copy=frame_bytes(part) < _COPY_BELOW_BYTES)


def receive_parts(
    made: "zmq.Socket[bytes]", *, most: int, first: Callable[[zmq.Frame], object] | None = None
) -> list[memoryview]:
    """Returns the parts of the next message, keeping at most `most` of them.

    `first` is called with the first part as a ZeroMQ frame. Raises zmq.Again if there is no message
    and TooManyPartsError if it has more parts.
    """
    frame = made.recv(zmq.NOBLOCK, copy=False)
    if first is not None:
        first(frame)
    parts = [frame.buffer]
    count = 1
    while frame.more:
        frame = made.recv(zmq.NOBLOCK, copy=False)
        count += 1
        if count <= most:
            parts.append(frame.buffer)
    if count > most:
        raise TooManyPartsError(parts[0].tobytes(), count, most)
    return parts


class TooManyPartsError(FrameError):
    """A message has too many parts; the first is the sender's identity at a ROUTER."""

    def __init__(self, first: bytes, count: int, most: int) -> None:
        super().__init__(f"a message came in {count} parts, and {most} is the most")
        self.first = first


class SocketGroup:
    """A context with its sockets, used by one thread; any thread may close or wake it.

    Each end has its own context, so that closing does not wait for other ends, and heartbeats are
    not queued behind arrays.
    """

    def __init__(self, what: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._what = what
        self._in_use = threading.RLock()
        self._closing = False
        self._sockets: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        # Plain sockets: writing to one is safe from any thread and signal handler.
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._poller.register(self._bell.fileno(), zmq.POLLIN)

    def keep(self, made: "zmq.Socket[bytes]") -> None:
        self._sockets.append(made)

    def watch(self, made: "zmq.Socket[bytes]") -> None:
        """Registers a socket to be waited on, and closed with the group."""
        self.keep(made)
        self._poller.register(made, zmq.POLLIN)

    def used(self) -> "SocketGroup":
        """Returns a context manager that keeps the sockets open; ClosedError once closed."""
        return self  # not a generator, since it runs for every message

    def __enter__(self) -> None:
        self._in_use.acquire()
        if self._closing:
            self._in_use.release()
            self._check_open()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._in_use.release()
        if error is None:
            self._check_open()

    def wait(self, until: float) -> tuple[set[object], bool]:
        """Returns the readable sockets, and whether the bell rang."""
        left_ms = math.ceil(max(0.0, until - time.monotonic()) * 1000)
        events = {readable for readable, _ in self._poller.poll(min(left_ms, _LONGEST_POLL_MS))}
        self._check_open()
        rang = self._bell.fileno() in events
        if rang:
            self._bell.recv(4096)
        return events - {self._bell.fileno()}, rang

    def ring(self) -> None:
        """Ends a wait; safe from any thread."""
        try:
            self._ringer.send(b"!")
        except BlockingIOError:
            pass  # the buffer is full of rings already
        except OSError:
            if not self._closing:
                raise

    def close(self) -> None:
        """Closes all sockets after waking the waiting thread and lingering."""
        self._closing = True
        self.ring()
        with self._in_use:
            if not self.context.closed:
                for made in self._sockets:
                    made.close()
                # Waits while they linger, and ends other threads' sockets of this context.
                self.context.term()
                self._bell.close()
                self._ringer.close()

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError(f"{self._what} closed")

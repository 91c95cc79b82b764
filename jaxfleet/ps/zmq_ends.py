"""What both ends of a ZeroMQ connection share: sockets, their options, waiting, and closing."""

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from jaxfleet.errors import ClosedError
from jaxfleet.ps.chunks import WHOLE_BYTES
from jaxfleet.ps.frames import Frame, FrameError, frame_bytes
from jaxfleet.ps.secret import Keys

# Sharing a frame with ZeroMQ's thread costs about 10 us, which is what copying 64 KB costs.
_COPY_BELOW_BYTES = 1 << 16
# Numbers, since joining flags anew for each part takes longer than copying a small one.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
# Answers that wait for one peer. A client has no such mark: what waits there are its own arrays.
_MOST_TO_SEND = 100_000
_KERNEL_BUFFER_BYTES = 1 << 20
_LONGEST_POLL_MS = 3_600_000
_MOST_RECEIVED = 256  # parts that wait to be read; more wait where they come from


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How soon an end notices things, in seconds.

    Attributes:
        reconnect_s: how long after a failed try to connect comes the next.
        handshake_s: how long a connection may take to say what it is.
        heartbeat_s: how often a silent connection is asked whether it is there.
        half_open_s: how long it may take to answer, with a large frame on its way too.
        linger_s: how long closing waits for what is under way.
    """

    reconnect_s: float = 0.1
    handshake_s: float = 10.0
    heartbeat_s: float = 5.0
    half_open_s: float = 30.0
    linger_s: float = 1.0


def make_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, timing: Timing
) -> "zmq.Socket[bytes]":
    """Returns a socket that gives nobody more memory or time than it should have.

    Measured on loopback with 2 cores: buffers of 1 MB in the kernel moved arrays of 1 and 8 MB
    faster than those of 4 MB, or those that it chooses, by up to a half; one I/O thread did as well
    as two.
    """
    made = context.socket(kind)
    made.setsockopt(zmq.SNDBUF, _KERNEL_BUFFER_BYTES)
    made.setsockopt(zmq.RCVBUF, _KERNEL_BUFFER_BYTES)
    made.copy_threshold = _COPY_BELOW_BYTES
    made.setsockopt(zmq.LINGER, _ms(timing.linger_s))
    made.setsockopt(zmq.SNDHWM, _MOST_TO_SEND if kind == zmq.ROUTER else 0)
    made.setsockopt(zmq.RCVHWM, _MOST_RECEIVED)
    made.setsockopt(zmq.MAXMSGSIZE, WHOLE_BYTES)
    made.setsockopt(zmq.IMMEDIATE, 0)
    made.setsockopt(zmq.TCP_KEEPALIVE, 1)
    made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, round(timing.half_open_s)))
    made.setsockopt(zmq.HANDSHAKE_IVL, _ms(timing.handshake_s))
    made.setsockopt(zmq.HEARTBEAT_IVL, _ms(timing.heartbeat_s))
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ms(timing.half_open_s))
    made.setsockopt(zmq.RECONNECT_IVL, _ms(timing.reconnect_s))
    made.setsockopt(zmq.RECONNECT_IVL_MAX, 0)  # no longer after many failures
    made.setsockopt(zmq.CONNECT_TIMEOUT, _ms(timing.handshake_s))
    return made


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def use_keys(made: "zmq.Socket[bytes]", keys: Keys, *, server: bool) -> None:
    """Makes a socket speak to those with the same secret alone."""
    if server:
        made.setsockopt(zmq.CURVE_SERVER, 1)
        made.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)
        return
    made.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    made.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
    made.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)


def send_parts(made: "zmq.Socket[bytes]", parts: Sequence[Frame]) -> None:
    """Sends parts as one, without waiting.

    Raises:
        zmq.Again: too many wait already.
    """
    last = len(parts) - 1
    for place, part in enumerate(parts):
        flags = _NOBLOCK if place == last else _NOBLOCK_MORE
        made.send(part, flags, copy=frame_bytes(part) < _COPY_BELOW_BYTES)


def receive_parts(
    made: "zmq.Socket[bytes]", *, most: int, first: Callable[[zmq.Frame], object] | None = None
) -> list[memoryview]:
    """Returns the next parts, of which no more than `most` are kept at a time.

    Args:
        made: the socket.
        most: so many.
        first: is given the first part as ZeroMQ has it.

    Raises:
        zmq.Again: there are none.
        FrameError: there were more than `most`; the first one says, as `first`, who sent them.
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
    """A message came in more parts than one may have.

    Args:
        first: the first of them.
        count: how many came.
        most: how many may.
    """

    def __init__(self, first: bytes, count: int, most: int) -> None:
        super().__init__(f"a message came in {count} parts, and {most} is the most")
        self.first = first


class End:
    """A context with its sockets, which one thread uses and any thread may close or wake.

    Each end has a context, so that closing waits for no other end, and heartbeats do not stand in
    line behind arrays.

    Args:
        what: what is closed, for the error.
    """

    def __init__(self, what: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._what = what
        self._in_use = threading.RLock()
        self._closing = False
        self._sockets: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        # A pair of plain sockets, since writing to one is safe from any thread and any handler.
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._poller.register(self._bell.fileno(), zmq.POLLIN)

    def keep(self, made: "zmq.Socket[bytes]") -> None:
        """Closes a socket in the end."""
        self._sockets.append(made)

    def watch(self, made: "zmq.Socket[bytes]") -> None:
        """Waits for a socket too, and closes it in the end."""
        self.keep(made)
        self._poller.register(made, zmq.POLLIN)

    def used(self) -> "End":
        """Returns what keeps the sockets open within a `with`, and says so where they are not.

        Raises:
            ClosedError: the end was closed.
        """
        return self  # no generator: this is done for every message

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
        """Returns which sockets have something to read, and whether the bell rang.

        Raises:
            ClosedError: the end was closed.
        """
        left_ms = math.ceil(max(0.0, until - time.monotonic()) * 1000)
        events = {readable for readable, _ in self._poller.poll(min(left_ms, _LONGEST_POLL_MS))}
        self._check_open()
        rang = self._bell.fileno() in events
        if rang:
            self._bell.recv(4096)
        return events - {self._bell.fileno()}, rang

    def ring(self) -> None:
        """Ends a wait; any thread may call it."""
        try:
            self._ringer.send(b"!")
        except BlockingIOError:
            pass  # it rings so much already that no more fits
        except OSError:
            if not self._closing:
                raise

    def close(self) -> None:
        """Closes everything, once whoever waits has been told; not before a moment has passed."""
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

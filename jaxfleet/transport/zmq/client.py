"""A client's connections to all servers, and a monitor that reconnects those that are dead.

If the peer at an address does not complete a handshake (another program on the port, another
secret), libzmq 4.3.5 may stop its attempts to connect and keep accepting messages, which are never
delivered: about one time in 500, visible only in the events of the socket. While it tries to
connect, there is an event for each attempt.

An open connection may be dead, too: a middlebox lost bytes of it, or the listener cannot decrypt
the next frame (libzmq then stops reading, since its own event overwrites `errno`). A client that
waits in vain for any message connects anew; the listener then gets the requests again.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from jaxfleet.errors import ConnectError
from jaxfleet.observability.notices import alert
from jaxfleet.transport.codec import Frame, FrameError, decode, encode
from jaxfleet.transport.framing import Reassembler, pack_frames, split_message, unpack_frames
from jaxfleet.transport.messages import Limits, Message
from jaxfleet.transport.secret import Keys
from jaxfleet.transport.shared_memory import Borrower, Lender, is_shared, share_frames
from jaxfleet.transport.zmq.sockets import (
    SocketGroup,
    Timing,
    ipc_address,
    ipc_name,
    listening_process,
    make_socket,
    receive_parts,
    send_parts,
    use_keys,
)

_TIMEOUT_FACTOR = 1.5  # of the duration of one attempt
_PATIENT_FACTOR = 10  # how much longer than one attempt a doubled patience lasts
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_REFUSALS, _REFUSED_S = 2, 3.0  # a starting or ending server may refuse one handshake
_SOON_S = 2.0  # until the first attempt after a disconnect


class ConnectionMonitor:
    """Tracks the state of one connection; its user polls it regularly.

    Args:
        line: the socket, not yet connected.
    """

    def __init__(
        self,
        line: "zmq.Socket[bytes]",
        end: SocketGroup,
        timing: Timing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._events = line.get_monitor_socket()
        end.keep(self._events)
        self._clock = clock
        self._limit_s = _TIMEOUT_FACTOR * timing.handshake_s + timing.reconnect_s
        self._soon_s = _SOON_S + timing.reconnect_s
        self._is_open = self._broke = self._is_renewed = False
        self._was_open = False
        self._refusals, self._refused_at = 0, 0.0
        self._since = self._looked = clock()
        self._silent_s = self._patience_s = timing.silent_s
        self._patient_until = clock()
        self._doubles = timing.doubles
        self._is_unanswered, self._waited_s = False, 0.0

    @property
    def is_given_up(self) -> bool:
        """Whether the connection is closed, and the last attempt is older than one may take."""
        self._read_events()
        limit_s = self._soon_s if self._broke else self._limit_s
        return not self._is_open and self._clock() - self._since > limit_s

    @property
    def is_silent(self) -> bool:
        """Whether the connection is open, and its user waited in vain for any message."""
        self._read_events()
        return self._is_open and self._waited_s > self._patience_s

    def sent(self) -> None:
        self._is_unanswered = True

    def received(self) -> None:
        # Over a slow line, the next message may take as long as this one; and one that the first
        # attempt was too short for is not the first to arrive over a new connection.
        if self._clock() > self._patient_until:
            self._patience_s = max(self._silent_s, 2 * self._waited_s)
        self._is_unanswered, self._waited_s = False, 0.0

    def count_wait(self) -> None:
        """Counts the time since the last call as waited for an answer, if it was short.

        A longer one was spent in computing, and the answer may be about to be read.
        """
        now = self._clock()
        if self._is_unanswered:
            self._waited_s += min(now - self._looked, _MOST_WAITED_S)
        self._looked = now

    @property
    def is_refused(self) -> bool:
        """Whether the peer has rejected all handshakes for some time, as without the secret."""
        self._read_events()
        refused_s = self._clock() - self._refused_at
        return self._refusals >= _REFUSALS and refused_s >= _REFUSED_S

    def take_renewed(self) -> bool:
        """Whether the connection was reopened since the last call."""
        self._read_events()
        renewed, self._is_renewed = self._is_renewed, False
        return renewed

    def _read_events(self) -> None:
        while self._events.poll(0):
            event = recv_monitor_message(self._events, zmq.NOBLOCK)["event"]
            # ZeroMQ reconnects at once after a disconnect, unless it gives up.
            self._broke = event == zmq.EVENT_DISCONNECTED and self._is_open
            self._is_open = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._is_open:
                self._refusals = 0
            elif event & _FAILED:
                self._refusals += 1
                self._refused_at = self._refused_at if self._refusals > 1 else self._clock()
            self._is_renewed = self._is_renewed or (self._is_open and self._was_open)
            self._was_open = self._was_open or self._is_open
            self._since = self._clock()

    def start_again(self) -> None:
        """Resets the timers after the socket was connected anew.

        The patience with a silent server doubles: it may only be busy, or the line slow.
        """
        self._is_open, self._broke, self._since = False, False, self._clock()
        if self._doubles and self._waited_s > self._patience_s:
            self._patience_s *= 2
            self._patient_until = self._clock() + _PATIENT_FACTOR * self._patience_s
        self._is_unanswered, self._waited_s = False, 0.0


_REFUSED = (
    "the listener at {} ends every handshake: its secret is another than this process's, or one of "
    "the two has none; give both the same secret file"
)
_LOOK_S = 0.2  # polling interval of silent connections
_MOST_WAITED_S = 2.0  # at a look: a caller may return from `receive` to do other things


class ZmqConnections:
    """A DEALER for each server, so that each has its own queue.

    Args:
        share_memory: share memory with servers that can map it.
        reported: servers whose refusal was already logged.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        limits: Limits,
        timing: Timing,
        keys: Keys | None,
        share_memory: bool,
        reported: set[str],
    ) -> None:
        self._names = tuple(address.removeprefix("tcp://") for address in addresses)
        self._reported = reported
        self._limits = limits
        self._named = tuple(addresses)
        nearest = [_nearest(address) for address in addresses]
        self._addresses = [address for address, _ in nearest]
        self._lenders = [Lender() if near and share_memory else None for _, near in nearest]
        self._borrower = Borrower(limits)
        self._end = SocketGroup("the lines to the servers are")
        self._readable: deque[int] = deque()
        self._rejected = 0
        self._joiners = [Reassembler(limits) for _ in addresses]
        self._watches: list[ConnectionMonitor] = []
        self._look_at = 0.0
        try:
            self._sockets = [self._connect(address, timing, keys) for address in self._addresses]
        except zmq.ZMQError as error:
            self._end.close()
            raise ConnectError(f"cannot connect to {', '.join(addresses)}: {error}") from error
        self._servers = {line: server for server, line in enumerate(self._sockets)}

    def _connect(self, address: str, timing: Timing, keys: Keys | None) -> "zmq.Socket[bytes]":
        line = make_socket(self._end.context, zmq.DEALER, timing)
        self._end.watch(line)
        self._watches.append(ConnectionMonitor(line, self._end, timing))
        line.setsockopt(zmq.IPV6, int("[" in address))
        if keys is not None:
            use_keys(line, keys, server=False)
        line.connect(address)
        return line

    @property
    def rejected(self) -> int:
        return self._rejected

    def send(self, server: int, message: Message) -> None:
        with self._end.used():
            frames: Sequence[Frame] = encode(message, limits=self._limits)
            if (lender := self._lenders[server]) is not None:
                frames = share_frames(frames, lender)
            for parts in split_message(frames):
                self._send_parts(server, pack_frames(parts))
            self._watches[server].sent()

    def _send_parts(self, server: int, parts: Sequence[Frame]) -> None:
        line = self._sockets[server]
        try:
            send_parts(line, parts)
        except zmq.Again:
            # ZeroMQ gave up the connection, as it does after a failed handshake: the peer lacks the
            # secret or is another program on the port. A later peer there may succeed.
            self._connect_again(server)
            send_parts(line, parts)

    def _connect_again(self, server: int) -> None:
        with suppress(zmq.ZMQError):
            self._sockets[server].disconnect(self._addresses[server])
        # A restarted server may have only TCP, if another user has taken its Unix socket's name.
        self._addresses[server], is_near = _nearest(self._named[server])
        if not is_near and (lender := self._lenders[server]) is not None:
            lender.close()
            self._lenders[server] = None
        self._sockets[server].connect(self._addresses[server])
        self._watches[server].start_again()

    def _look_after_lines(self) -> None:
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_S
        for server, watch in enumerate(self._watches):
            if watch.is_refused and self._names[server] not in self._reported:
                self._reported.add(self._names[server])
                alert(_REFUSED.format(self._names[server]))
            watch.count_wait()
            if watch.is_given_up or watch.is_silent:
                self._connect_again(server)

    def renewed(self) -> Collection[int]:
        with self._end.used():
            return [server for server, watch in enumerate(self._watches) if watch.take_renewed()]

    def renew(self, server: int) -> None:
        with self._end.used():
            self._connect_again(server)

    def receive(self, timeout_s: float) -> tuple[int, Message] | None:
        until = time.monotonic() + timeout_s
        with self._end.used():
            while True:
                if self._readable:
                    if (found := self._take()) is not None:
                        return found
                    if time.monotonic() < until:
                        continue
                events, _ = self._end.wait(until)
                ready = (server for line, server in self._servers.items() if line in events)
                self._readable.extend(s for s in ready if s not in self._readable)
                if not self._readable:
                    self._look_after_lines()
                    if time.monotonic() >= until:
                        return None

    def _take(self) -> tuple[int, Message] | None:
        """Reads once from the next server in turn; those with more stay queued."""
        server = self._readable.popleft()
        try:
            parts = receive_parts(self._sockets[server], most=self._limits.max_parts)
        except zmq.Again:
            return None
        except FrameError:
            self._rejected += 1
            return None
        self._readable.append(server)
        self._watches[server].received()
        try:
            frames = self._joiners[server].add(unpack_frames(parts, most=self._limits.max_parts))
            if frames is not None and is_shared(frames):
                frames = self._borrower.find(frames, server)
            return None if frames is None else (server, decode(frames, self._limits))
        except FrameError:
            self._rejected += 1
            return None

    def close(self) -> None:
        self._end.close()
        for lender in self._lenders:
            if lender is not None:
                lender.close()


def _nearest(address: str) -> tuple[str, bool]:
    """Returns a server's address, its Unix socket if any, and whether it can map memory."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    name = ipc_name(host, int(port))
    pid = None if name is None else listening_process(name)
    if name is None or pid is None:
        return address, False
    return ipc_address(name), pid > 0

"""A client's lines to all servers, over ZeroMQ."""

import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress

import zmq

from jaxfleet.errors import ConnectError
from jaxfleet.ps.chunks import Joiner, split
from jaxfleet.ps.frames import Frame, FrameError
from jaxfleet.ps.limits import Limits
from jaxfleet.ps.messages import Message
from jaxfleet.ps.packing import pack, unpack
from jaxfleet.ps.secret import Keys
from jaxfleet.ps.shared_arena import Lender
from jaxfleet.ps.shared_frames import Borrower, is_placed, place
from jaxfleet.ps.wire import decode, encode
from jaxfleet.ps.zmq_ends import End, Timing, make_socket, receive_parts, send_parts, use_keys
from jaxfleet.ps.zmq_local import local_address, local_name, who_answers
from jaxfleet.ps.zmq_watch import Watch
from jaxfleet.watch.notices import alert

_REFUSED = (
    "the listener at {} ends every handshake: its secret is another than this process's, or one of "
    "the two has none; give both the same secret file"
)
_LOOK_S = 0.2  # between two looks at lines that are silent


class ZmqLines:
    """A DEALER for each server, so that each has a line of its own.

    Args:
        addresses: of the servers, as ZeroMQ names them.
        limits: how much a message may hold.
        timing: how soon things are noticed.
        keys: of the job's secret.
        share_memory: with servers that see it.
        complaints: the addresses of servers that were logged to refuse this process.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        limits: Limits,
        timing: Timing,
        keys: Keys | None,
        share_memory: bool,
        complaints: set[str],
    ) -> None:
        self._names, self._complaints = (
            tuple(a.removeprefix("tcp://") for a in addresses),
            complaints,
        )
        self._limits = limits
        self._named = tuple(addresses)
        nearest = [_nearest(address) for address in addresses]
        self._addresses = [address for address, _ in nearest]
        self._lenders = [Lender() if near and share_memory else None for _, near in nearest]
        self._borrower = Borrower(limits)
        self._end = End("the lines to the servers are")
        self._readable: deque[int] = deque()
        self._rejected = 0
        self._joiners = [Joiner(limits) for _ in addresses]
        self._watches: list[Watch] = []
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
        self._watches.append(Watch(line, self._end, timing))
        line.setsockopt(zmq.IPV6, int("[" in address))
        if keys is not None:
            use_keys(line, keys, server=False)
        line.connect(address)
        return line

    @property
    def rejected(self) -> int:
        """How many frames from servers were no messages."""
        return self._rejected

    def send(self, server: int, message: Message) -> None:
        with self._end.used():
            frames: Sequence[Frame] = encode(message, limits=self._limits)
            if (lender := self._lenders[server]) is not None:
                frames = place(frames, lender)
            for parts in split(frames):
                self._send_parts(server, pack(parts))

    def _send_parts(self, server: int, parts: Sequence[Frame]) -> None:
        line = self._sockets[server]
        try:
            send_parts(line, parts)
        except zmq.Again:
            # ZeroMQ gave the line up, as it does where what answered did not speak as it should:
            # without the secret, or a stranger on the port. The next one there may.
            self._connect_again(server)
            send_parts(line, parts)

    def _connect_again(self, server: int) -> None:
        with suppress(zmq.ZMQError):
            self._sockets[server].disconnect(self._addresses[server])
        # A server that came back may have TCP alone, where another user has its Unix socket's name.
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
            if watch.is_refused and self._names[server] not in self._complaints:
                self._complaints.add(self._names[server])
                alert(_REFUSED.format(self._names[server]))
            if watch.is_given_up:
                self._connect_again(server)

    def renewed(self) -> Collection[int]:
        with self._end.used():
            return [server for server, watch in enumerate(self._watches) if watch.take_renewed()]

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
                self._readable.extend(
                    s
                    for line, s in self._servers.items()
                    if line in events and s not in self._readable
                )
                if not self._readable:
                    self._look_after_lines()
                    if time.monotonic() >= until:
                        return None

    def _take(self) -> tuple[int, Message] | None:
        """Reads once from the server whose turn it is; those that have more stay in line."""
        server = self._readable.popleft()
        try:
            parts = receive_parts(self._sockets[server], most=self._limits.max_parts)
        except zmq.Again:
            return None
        except FrameError:
            self._rejected += 1
            return None
        self._readable.append(server)
        try:
            frames = self._joiners[server].add(unpack(parts, most=self._limits.max_parts))
            if frames is not None and is_placed(frames):
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
    """Returns where to reach a server: its Unix socket where it has one; and if it sees memory."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    name = local_name(host, int(port))
    pid = None if name is None else who_answers(name)
    if name is None or pid is None:
        return address, False
    return local_address(name), pid > 0

"""A server's end of all lines to it, over ZeroMQ."""

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from jaxfleet.ps.chunks import Joiner, PieceError, split
from jaxfleet.ps.doorway import WITHOUT_SECRET, DoorLimits
from jaxfleet.ps.frames import Frame, FrameError
from jaxfleet.ps.limits import Limits
from jaxfleet.ps.messages import Kind, Message
from jaxfleet.ps.network import Peer
from jaxfleet.ps.packing import pack, unpack
from jaxfleet.ps.secret import Keys
from jaxfleet.ps.shared_arena import Lender
from jaxfleet.ps.shared_frames import Borrower, is_placed, place
from jaxfleet.ps.wire import decode, encode
from jaxfleet.ps.zmq_door import Door
from jaxfleet.ps.zmq_ends import (
    End,
    Timing,
    TooManyPartsError,
    make_socket,
    receive_parts,
    send_parts,
    use_keys,
)
from jaxfleet.ps.zmq_local import local_address, local_name, who_answers

_MOST_NEAR = 256


class ZmqListener:
    """A ROUTER: it names each connection, and answers go to the one that they are for.

    Args:
        address: to bind, as ZeroMQ names it.
        host: as the user named it.
        limits: how much a message may hold.
        timing: how soon things are noticed.
        keys: of the job's secret.
        share_memory: with peers that share theirs.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        *,
        host: str,
        limits: Limits,
        timing: Timing,
        keys: Keys | None,
        share_memory: bool,
    ) -> None:
        self._share_memory = share_memory
        self._limits = limits
        self._timing = timing
        self._rejected = 0
        self._joiners: dict[Peer, tuple[Joiner, float]] = {}  # with when each took something
        self._borrower = Borrower(limits)
        self._lender = Lender()
        # Without a secret: the descriptor of the connection that the last message came on.
        self._came_on: Callable[[zmq.Frame], object] | None = self._note if keys is None else None
        self._descriptor = -1
        self._near = deque[Peer](maxlen=_MOST_NEAR)  # those that lent something themselves
        self._end = End(f"the listener at {host} is")
        self._router = make_socket(self._end.context, zmq.ROUTER, timing)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 0)  # nobody takes another's name
        self._router.setsockopt(zmq.IPV6, int("[" in address))
        self._end.watch(self._router)
        try:
            if keys is not None:
                use_keys(self._router, keys, server=True)
            usual = DoorLimits(longest_s=timing.handshake_s)
            self._door = Door(
                self._end.context, self._router, keys, usual if keys else WITHOUT_SECRET
            )
            self._router.bind(address)
            port = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
            if (name := local_name(host, int(port))) is not None:
                self._bind_local(name)
        except zmq.ZMQError:
            self._end.close()
            raise
        self._endpoint = f"{host}:{port}"
        self._door.listens_at(self._endpoint)

    def _bind_local(self, name: str) -> None:
        """Listens on the Unix socket too, unless another user has taken its name.

        Anyone may take any such name: then there is TCP alone, as clients see by the same question.
        """
        # Over a Unix socket the kernel says whose a connection is; other users have TCP.
        self._router.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        try:
            self._router.bind(local_address(name))
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or who_answers(name) is not None:
                raise

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def rejected(self) -> int:
        return self._rejected

    @property
    def cut(self) -> int:
        """How many connections were cut that had not proved that they have the secret."""
        return self._door.cut

    def receive(self, timeout_s: float) -> tuple[Peer, Message] | None:
        until = time.monotonic() + timeout_s
        with self._end.used():
            while True:
                try:
                    if (found := self._take()) is not None:
                        return found
                    if time.monotonic() < until:
                        continue
                except zmq.Again:
                    self._forget_stale()
                events, rang = self._end.wait(until)
                if rang or not events:
                    return None

    def _take(self) -> tuple[Peer, Message] | None:
        """Reads once. What is no message is answered, and counted."""
        try:
            # The first part is the name that the ROUTER gave the peer.
            name, *parts = receive_parts(
                self._router, most=self._limits.max_parts + 1, first=self._came_on
            )
        except TooManyPartsError as error:
            self._reject(error.first, error)
            return None
        peer = name.tobytes()
        try:
            frames = self._joined(peer, unpack(parts, most=self._limits.max_parts))
            if frames is not None and is_placed(frames):
                frames = self._borrower.find(frames, peer)
                self._lend_to(peer)
            return None if frames is None else (peer, decode(frames, self._limits))
        except PieceError:
            self._rejected += 1  # no answer: each piece after one that is wrong is wrong as well
        except FrameError as error:
            self._reject(peer, error)
        return None

    def _note(self, frame: zmq.Frame) -> None:
        self._descriptor = int(frame.get(zmq.SRCFD))

    def trust(self, _: Peer) -> None:
        if self._came_on is not None:
            self._door.trust(self._descriptor)

    def _joined(self, peer: Peer, parts: Sequence[Frame]) -> Sequence[Frame] | None:
        found = self._joiners.pop(peer, None)
        joiner = Joiner(self._limits) if found is None else found[0]
        frames = joiner.add(parts)
        if joiner.busy:
            self._joiners[peer] = joiner, time.monotonic()
        return frames

    def _forget_stale(self) -> None:
        """Gives up what connections began to send and left."""
        if self._joiners:
            since = time.monotonic() - self._timing.half_open_s
            self._joiners = {p: (j, at) for p, (j, at) in self._joiners.items() if at > since}

    def _lend_to(self, peer: Peer) -> None:
        """Notes that a peer is on this machine, and sees the memory of processes here."""
        if self._share_memory and peer not in self._near:
            self._near.append(peer)

    def _reject(self, peer: Peer, error: FrameError) -> None:
        self._rejected += 1
        body = {
            "error": "bad_message",
            "what": error.what,
            "hint": "run the same jaxfleet everywhere",
        }
        sender = f"server at {self._endpoint}"
        self._send(peer, Message(Kind.ERROR, sender, number=error.number, body=body))

    def send(self, peer: Peer, message: Message) -> None:
        with self._end.used():
            self._send(peer, message)

    def _send(self, peer: Peer, message: Message) -> None:
        frames: Sequence[Frame] = encode(message, limits=self._limits)
        if peer in self._near:
            sources = [tensor.array for tensor in message.tensors]
            frames = place(frames, self._lender, sources=sources)
        for parts in split(frames):
            send_parts(self._router, [peer, *pack(parts)])

    def wake(self) -> None:
        self._end.ring()

    def close(self) -> None:
        self._end.close()
        self._lender.close()

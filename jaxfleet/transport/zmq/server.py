"""A server's listener over ZeroMQ."""

import errno
import os
import time
from collections import deque
from collections.abc import Collection, Sequence

import zmq

from jaxfleet.transport.codec import Frame, FrameError, decode, encode
from jaxfleet.transport.framing import (
    ChunkError,
    Reassembler,
    pack_frames,
    split_message,
    unpack_frames,
)
from jaxfleet.transport.messages import Kind, Limits, Message, Peer
from jaxfleet.transport.secret import Keys
from jaxfleet.transport.shared_memory import Borrower, Lender, is_shared, share_frames
from jaxfleet.transport.zmq.authentication import (
    LIMITS_WITHOUT_SECRET,
    AdmissionLimits,
    Authenticator,
)
from jaxfleet.transport.zmq.sockets import (
    SocketGroup,
    Timing,
    TooManyPartsError,
    ipc_address,
    ipc_name,
    listening_process,
    make_socket,
    receive_parts,
    send_parts,
    use_keys,
)

_MOST_NEAR = 256
_MOST_ENDED = 4096  # peers; a caller that does not ask for them loses the oldest


class ZmqListener:
    """A ROUTER, which identifies each connection and routes replies to it.

    Args:
        host: the host as the user specified it.
        share_memory: share memory with peers that share theirs.

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
        self._is_open_to_all = keys is None
        self._limits = limits
        self._timing = timing
        self._rejected = 0
        self._joiners: dict[Peer, tuple[Reassembler, float]] = {}  # with the time of the last chunk
        self._borrower = Borrower(limits)
        self._lender = Lender()
        self._descriptor = -1  # of the last message's connection
        self._peers: dict[int, Peer] = {}  # by descriptor
        self._ended = deque[Peer](maxlen=_MOST_ENDED)
        self._near = deque[Peer](maxlen=_MOST_NEAR)  # peers that lent memory themselves
        self._end = SocketGroup(f"the listener at {host} is")
        self._router = make_socket(self._end.context, zmq.ROUTER, timing)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 0)  # no peer can take over another's identity
        self._router.setsockopt(zmq.IPV6, int("[" in address))
        self._end.watch(self._router)
        try:
            if keys is not None:
                use_keys(self._router, keys, server=True)
            usual = AdmissionLimits(longest_s=timing.handshake_s)
            self._door = Authenticator(
                self._end.context, self._router, keys, usual if keys else LIMITS_WITHOUT_SECRET
            )
            self._router.bind(address)
            port = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
            if (name := ipc_name(host, int(port))) is not None:
                self._bind_local(name)
        except zmq.ZMQError:
            self._end.close()
            raise
        self._endpoint = f"{host}:{port}"
        self._door.listens_at(self._endpoint)

    def _bind_local(self, name: str) -> None:
        """Listens on the Unix socket too, unless another user has taken its name.

        Any user may take such a name; then only TCP is used, which clients detect by the same
        probe.
        """
        # On a Unix socket the kernel reports the peer's user; other users have TCP.
        self._router.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        try:
            self._router.bind(ipc_address(name))
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or listening_process(name) is not None:
                raise

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def rejected(self) -> int:
        return self._rejected

    @property
    def cut(self) -> int:
        """Number of connections cut before they proved possession of the secret."""
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
        """Reads once. A malformed message is answered with an error and counted."""
        try:
            # The first part is the peer's identity, assigned by the ROUTER.
            name, *parts = receive_parts(
                self._router, most=self._limits.max_parts + 1, first=self._note
            )
        except TooManyPartsError as error:
            self._reject(error.first, error)
            return None
        peer = name.tobytes()
        try:
            frames = self._joined(peer, unpack_frames(parts, most=self._limits.max_parts))
            if frames is not None and is_shared(frames):
                frames = self._borrower.find(frames, peer)
                if self._share_memory and peer not in self._near:  # it can map this process's too
                    self._near.append(peer)
            return None if frames is None else (peer, decode(frames, self._limits))
        except ChunkError:
            self._rejected += 1  # no reply: every chunk after a wrong one is wrong too
        except FrameError as error:
            self._reject(peer, error)
        return None

    def _note(self, frame: zmq.Frame) -> None:
        """Records the connection of a message, whose first part names its peer."""
        self._descriptor, peer = int(frame.get(zmq.SRCFD)), frame.bytes
        if self._peers.get(self._descriptor) != peer:
            self._note_ends()  # the descriptor's last connection is among them
            self._peers[self._descriptor] = peer

    def _note_ends(self) -> None:
        while self._door.ended:
            peer = self._peers.pop(self._door.ended.popleft(), None)
            if peer is not None:
                self._ended.append(peer)

    def ended(self) -> Collection[Peer]:
        self._note_ends()
        found = [*self._ended]
        self._ended.clear()
        return found

    def trust(self, _: Peer) -> None:
        if self._is_open_to_all:
            self._door.trust(self._descriptor)

    def _joined(self, peer: Peer, parts: Sequence[Frame]) -> Sequence[Frame] | None:
        found = self._joiners.pop(peer, None)
        joiner = Reassembler(self._limits) if found is None else found[0]
        frames = joiner.add(parts)
        if joiner.busy:
            self._joiners[peer] = joiner, time.monotonic()
        return frames

    def _forget_stale(self) -> None:
        """Drops incomplete messages of connections that stopped sending."""
        if self._joiners:
            since = time.monotonic() - self._timing.half_open_s
            self._joiners = {p: (j, at) for p, (j, at) in self._joiners.items() if at > since}

    def _reject(self, peer: Peer, error: FrameError) -> None:
        self._rejected += 1
        hint = "run the same jaxfleet everywhere"
        body = {"error": "bad_message", "what": error.what, "hint": hint}
        sender = f"server at {self._endpoint}"
        self._send(peer, Message(Kind.ERROR, sender, number=error.number, body=body))

    def send(self, peer: Peer, message: Message) -> None:
        with self._end.used():
            self._send(peer, message)

    def _send(self, peer: Peer, message: Message) -> None:
        frames: Sequence[Frame] = encode(message, limits=self._limits)
        if peer in self._near:
            sources = [tensor.array for tensor in message.tensors]
            frames = share_frames(frames, self._lender, sources=sources)
        for parts in split_message(frames):
            send_parts(self._router, [peer, *pack_frames(parts)])

    def wake(self) -> None:
        self._end.ring()

    def close(self) -> None:
        self._end.close()
        self._lender.close()

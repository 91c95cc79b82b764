"""Messages between processes, limits on their size, and the interface of networks that carry them.

A message is a small header and raw arrays; nothing in it is executed. It has a kind, a sender and a
step; docs/parameter-servers.md lists the fields of each kind. Steps are numbered from 1; step 0 is
the initial state.

`transport.zmq` carries messages between processes, `transport.memory_network` inside one process.
Neither interprets them.
"""

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

PROTOCOL = 2


class Kind(enum.Enum):
    """The purpose of a message."""

    HELLO = "hello"
    WELCOME = "welcome"
    DEFINE = "define"
    ASSIGN = "assign"
    PUSH = "push"
    PULL = "pull"
    LEASE = "lease"
    VALUES = "values"
    LOOK_UP = "look_up"
    ROWS = "rows"
    PUSH_ROWS = "push_rows"
    REDUCE = "reduce"
    REDUCED = "reduced"
    BARRIER = "barrier"
    PENDING = "pending"
    JOIN = "join"
    LEAVE = "leave"
    MOVE = "move"
    MEMBERS = "members"
    PARTS = "parts"
    KEEP = "keep"
    RECALL = "recall"
    SAVE = "save"
    LOAD = "load"
    SHRINK = "shrink"
    EXPORT = "export"
    STATS = "stats"
    HEARTBEAT = "heartbeat"
    BYE = "bye"
    OK = "ok"
    ERROR = "error"


@dataclass(frozen=True)
class Tensor:
    """A named array in a message.

    Attributes:
        array: any shape, in C order, with a dtype that a header can name.
    """

    name: str
    array: np.ndarray


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        sender: `trainer 0`, `server 1`.
        number: sequence number of a request from its sender to this receiver; a reply has the
            number of its request. A resent request keeps its number.
        body: plain data that msgpack can encode.
    """

    kind: Kind
    sender: str
    step: int = 0
    number: int = 0
    body: Mapping[str, Plain] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Size limits beyond which a message is malformed.

    The defaults admit whole models. Set them closer to the job's needs: a hostile peer can make
    a process hold one message of the maximum size, and no more.

    Attributes:
        max_tensors: arrays in one message.
        max_bytes: bytes in one array.
        max_message_bytes: bytes in one message, including its header.
        max_body_bytes: bytes in a header, which contains the body and the arrays' names.
        max_values: total entries of all lists and maps in a header. A value of one byte on the wire
            may take 64 bytes in memory, so the size in bytes does not bound it.
        max_name: characters in a name.
        max_rank: axes of an array.
        max_depth: nesting depth of lists and maps in a body.
    """

    max_tensors: int = 4096
    max_bytes: int = 2 << 30
    max_message_bytes: int = 4 << 30
    max_body_bytes: int = 64 << 20
    max_values: int = 1 << 20
    max_name: int = 1024
    max_rank: int = 32
    max_depth: int = 16

    @property
    def max_frames(self) -> int:
        """Maximum number of frames of one message: its header and one for each array."""
        return self.max_tensors + 1

    @property
    def max_parts(self) -> int:
        """Maximum number of parts that one message travels in.

        One more than its frames: the first part locates arrays in shared memory (`share_frames`).
        Packing reduces the number, and a chunk of a large message is two parts.
        """
        return self.max_frames + 1


Peer: TypeAlias = bytes  # a listener's name for one connection


class Connections(Protocol):
    """A client's connections to all servers, for use by one thread at a time."""

    def send(self, server: int, message: Message) -> None:
        """Queues a message to a server without blocking.

        The arrays must not change until the server has received them.

        Raises:
            ClosedError: the connections were closed.
        """
        ...

    def receive(self, timeout_s: float) -> tuple[int, Message] | None:
        """Returns the next message and the number of its server, or None after a timeout.

        Its arrays may be read-only and unaligned.

        Raises:
            ClosedError: the connections were closed.
        """
        ...

    def renewed(self) -> Collection[int]:
        """Returns the servers reconnected since the last call.

        Messages in flight on the broken connection may be lost.
        """
        ...

    def renew(self, server: int) -> None:
        """Connects to a server anew, over which nothing arrives as it was sent.

        Messages in flight on the old connection may be lost.
        """
        ...

    def close(self) -> None:
        """Closes, after a short wait for pending messages to be sent."""
        ...


class Listener(Protocol):
    """A server's end of all its connections. One thread uses it, except for `wake`."""

    def receive(self, timeout_s: float) -> tuple[Peer, Message] | None:
        """Returns the next message and its peer, or None after a timeout or `wake`.

        A malformed frame is answered with an error, counted, and not returned.
        """
        ...

    def send(self, peer: Peer, message: Message) -> None:
        """Sends a message to a peer; a message to a closed connection is silently dropped.

        The arrays must never change: an array sent to several peers may be copied only once.
        """
        ...

    def trust(self, peer: Peer) -> None:
        """Marks the sender of the last message as a participant in the job.

        Without a secret, other connections are limited in number, size and duration.
        """
        ...

    def ended(self) -> Collection[Peer]:
        """Returns the peers whose connection has ended since the last call."""
        ...

    def wake(self) -> None:
        """Makes a blocked `receive` return; safe from any thread."""
        ...

    @property
    def endpoint(self) -> str:
        """The address it listens on, with the assigned port if 0 was requested."""
        ...

    @property
    def rejected(self) -> int:
        """Number of malformed frames."""
        ...

    def close(self) -> None:
        """Closes, after a short wait for pending messages to be sent."""
        ...


class Network(Protocol):
    """A transport for messages."""

    def connect(self, endpoints: Sequence[str]) -> Connections:
        """Returns connections to servers (`127.0.0.1:6174`), which need not be running yet."""
        ...

    def listen(self, endpoint: str) -> Listener:
        """Returns a listener; port 0 selects a free one.

        Raises:
            ConnectError: the port is taken or may not be bound.
        """
        ...

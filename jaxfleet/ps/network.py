"""The seam between the runtime and the wire: whatever carries messages is a `Network`.

`zmq_network` carries them between processes, `memory_network` inside one. Neither knows what a
message means.
"""

from collections.abc import Collection, Sequence
from typing import Protocol, TypeAlias

from jaxfleet.ps.messages import Message

Peer: TypeAlias = bytes  # a listener's name for one connection


class Lines(Protocol):
    """A client's lines to all servers, waited on together. One thread at a time uses them."""

    def send(self, server: int, message: Message) -> None:
        """Sends a message to a server, some time soon; never waits for the server.

        The arrays must not change until the server has them.

        Raises:
            ClosedError: the lines were closed.
        """
        ...

    def receive(self, timeout_s: float) -> tuple[int, Message] | None:
        """Returns the next message and which server it is from, or None where none came in time.

        Its arrays may be read-only, and need not be aligned.

        Raises:
            ClosedError: the lines were closed.
        """
        ...

    def renewed(self) -> Collection[int]:
        """Returns the servers whose connection broke and stands again since the last call.

        What was on its way over the broken connection may be lost.
        """
        ...

    def close(self) -> None:
        """Sends what is under way, for a moment, and closes."""
        ...


class Listener(Protocol):
    """A server's end of all lines to it. One thread uses it, but for `wake`."""

    def receive(self, timeout_s: float) -> tuple[Peer, Message] | None:
        """Returns the next message and who it is from, or None: nothing came, or `wake` was called.

        A frame that is no message is answered with an error, counted, and not returned.
        """
        ...

    def send(self, peer: Peer, message: Message) -> None:
        """Sends a message to a connection; one that is gone gets nothing, and that is no error.

        The arrays must never change: what goes to several connections may be copied once.
        """
        ...

    def trust(self, peer: Peer) -> None:
        """Notes that who sent the last message takes part in the job.

        Without a secret, connections of which that is not said are few, small and short-lived.
        """
        ...

    def wake(self) -> None:
        """Makes a `receive` that waits return; any thread may call it."""
        ...

    @property
    def endpoint(self) -> str:
        """Where it listens, with the port that was found where 0 was asked for."""
        ...

    @property
    def rejected(self) -> int:
        """How many frames were no messages."""
        ...

    def close(self) -> None:
        """Sends what is under way, for a moment, and closes."""
        ...


class Network(Protocol):
    """What carries messages."""

    def connect(self, endpoints: Sequence[str]) -> Lines:
        """Returns lines to servers, which need not be there yet: `127.0.0.1:6174`."""
        ...

    def listen(self, endpoint: str) -> Listener:
        """Returns a server's end; port 0 takes a free one.

        Raises:
            ConnectError: the port is taken, or may not be bound.
        """
        ...

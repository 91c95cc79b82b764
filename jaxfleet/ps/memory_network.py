"""A network inside one process, on which the same program runs the same way every time.

::

    network = MemoryNetwork()
    network.run({"server 0": server.serve, "trainer 0": train, "trainer 1": train})
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from jaxfleet.errors import ClosedError, ConnectError
from jaxfleet.ps.baton import Baton
from jaxfleet.ps.limits import Limits
from jaxfleet.ps.messages import Message, Tensor
from jaxfleet.ps.network import Peer
from jaxfleet.ps.wire import decode, encode

Faults: TypeAlias = Callable[[str, Message], int]
"""Says how many copies of a message arrive: 0 loses it. Given the server's endpoint, whichever way
the message goes; `Message.sender` says which."""


class MemoryNetwork:
    """Carries messages between threads that take turns.

    A message to a server that does not listen yet waits for it, as on the real network; what a
    server had not read when it closed is lost. Arrays are shared, and read-only where they arrive.

    Args:
        through_wire: whether each message is encoded and decoded on its way, which copies it.
        faults: loses or repeats messages.
        limits: how much a message may hold, `through_wire`.
    """

    def __init__(
        self,
        *,
        through_wire: bool = False,
        faults: Faults | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._through_wire = through_wire
        self._faults = faults
        self._limits = limits or Limits()
        self._baton = Baton()
        self._listeners: dict[str, MemoryListener] = {}
        self._early: dict[str, deque[tuple[MemoryLines, int, Message]]] = {}
        self._numbers = 0

    def run(
        self, participants: Mapping[str, Callable[[], Any]], *, longest_s: float = 100.0
    ) -> dict[str, Any]:
        """Runs the participants to their ends, one at a time, and returns what they returned.

        They start in the order given, and each goes on until it waits in `receive` or `sleep`.
        The first exception in one ends the others by a ClosedError where they wait, and is raised
        here.

        Raises:
            ConnectError: they took more real seconds than `longest_s`.
        """
        return self._baton.run(participants, longest_s=longest_s)

    def clock(self) -> float:
        """Returns the network's time in seconds, which passes only where all wait."""
        return self._baton.clock()

    def sleep(self, seconds: float) -> None:
        """Lets the others run for so long, by the network's time."""
        self._baton.wait(lambda: False, seconds)

    def connect(self, endpoints: Sequence[str]) -> "MemoryLines":
        return MemoryLines(self, endpoints)

    def listen(self, endpoint: str) -> "MemoryListener":
        host, _, port = endpoint.rpartition(":")
        if port == "0":
            endpoint = f"{host}:{self.new_number()}"
        if endpoint in self._listeners:
            raise ConnectError(f"{endpoint} is taken", hint="port 0 takes a free one")
        listener = MemoryListener(self, endpoint)
        self._listeners[endpoint] = listener
        for lines, server, message in self._early.pop(endpoint, ()):
            listener.put(lines, server, message)
        return listener

    def new_number(self) -> int:
        """Returns a number that was not given before."""
        self._numbers += 1
        return self._numbers

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Lets others run until `ready`, or until the time is up."""
        self._baton.wait(ready, timeout_s)

    def to_server(self, lines: "MemoryLines", server: int, message: Message) -> None:
        """Carries a message to a listener, which may not be there yet."""
        endpoint = lines.endpoints[server]
        for copy in self.carried(endpoint, message):
            if (listener := self._listeners.get(endpoint)) is not None:
                listener.put(lines, server, copy)
            else:
                self._early.setdefault(endpoint, deque()).append((lines, server, copy))

    def carried(self, endpoint: str, message: Message) -> list[Message]:
        """Returns the copies of a message that arrive."""
        copies = 1 if self._faults is None else self._faults(endpoint, message)
        if self._through_wire:
            frames = encode(message, limits=self._limits)
            return [decode([bytes(frame) for frame in frames], self._limits)] * copies
        return [replace(message, tensors=tuple(map(_read_only, message.tensors)))] * copies

    def forget(self, endpoint: str) -> None:
        """Frees a listener's endpoint for the next."""
        self._listeners.pop(endpoint, None)


def _read_only(tensor: Tensor) -> Tensor:
    array = tensor.array.view()
    array.flags.writeable = False
    return Tensor(tensor.name, array)


class MemoryLines:
    """A participant's lines to servers."""

    def __init__(self, network: MemoryNetwork, endpoints: Sequence[str]) -> None:
        self._network = network
        self._queue: deque[tuple[int, Message]] = deque()
        self._closed = False
        self.endpoints = tuple(endpoints)

    def send(self, server: int, message: Message) -> None:
        self._check_open()
        self._network.to_server(self, server, message)

    def receive(self, timeout_s: float) -> tuple[int, Message] | None:
        self._check_open()
        if not self._queue:
            self._network.wait(lambda: bool(self._queue) or self._closed, timeout_s)
            self._check_open()
        return self._queue.popleft() if self._queue else None

    def renewed(self) -> Collection[int]:
        return ()  # no connection ever breaks here

    def put(self, server: int, message: Message) -> None:
        """Takes a message that arrived."""
        if not self._closed:
            self._queue.append((server, message))

    def close(self) -> None:
        self._closed = True
        self._queue.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the lines to the servers are closed")


class MemoryListener:
    """A server's end."""

    def __init__(self, network: MemoryNetwork, endpoint: str) -> None:
        self._network = network
        self._endpoint = endpoint
        self._queue: deque[tuple[Peer, Message]] = deque()
        self._lines: dict[Peer, tuple[MemoryLines, int]] = {}
        self._peers: dict[tuple[int, int], Peer] = {}
        self._woken = False
        self._closed = False

    def receive(self, timeout_s: float) -> tuple[Peer, Message] | None:
        self._check_open()
        if not self._queue and not self._woken:
            self._network.wait(self._has_news, timeout_s)
            self._check_open()
        if self._queue:
            return self._queue.popleft()
        self._woken = False
        return None

    def send(self, peer: Peer, message: Message) -> None:
        self._check_open()
        if (found := self._lines.get(peer)) is not None:
            lines, server = found
            for copy in self._network.carried(self._endpoint, message):
                lines.put(server, copy)

    def trust(self, _: Peer) -> None:
        """Does nothing: there are no strangers here."""

    def put(self, lines: MemoryLines, server: int, message: Message) -> None:
        """Takes a message that arrived."""
        key = (id(lines), server)  # `_lines` keeps them alive, so the id stays theirs
        if key not in self._peers:
            peer = b"%d" % self._network.new_number()
            self._peers[key], self._lines[peer] = peer, (lines, server)
        self._queue.append((self._peers[key], message))

    def wake(self) -> None:
        self._woken = True

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def rejected(self) -> int:
        return 0  # what is sent here was a message before it went

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.clear()
            self._network.forget(self._endpoint)

    def _has_news(self) -> bool:
        return bool(self._queue) or self._woken or self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the listener at {self._endpoint} is closed")

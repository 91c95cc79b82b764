"""A network with the interface of `transport`, on the simulation's clock, with faults.

A connection keeps the order of its messages, as TCP does; messages of different connections
overtake each other. A connection breaks with its process, or by a reset: what is under way is lost,
later messages wait until it is open again, and the server then sees another peer.
"""

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.errors import ClosedError, ConnectError
from jaxfleet.testing.simulation.faults import Weather
from jaxfleet.testing.simulation.scheduler import Process, Scheduler, Task
from jaxfleet.transport.messages import Kind, Message, Peer, Tensor

_REOPEN_S = 0.05  # until a broken connection is open again
_UNTRACED = frozenset({"resident", "versions", "executables"})  # depend on the machine, or process


@dataclass
class Inbox:
    """A queue with at most one task that waits for it."""

    scheduler: Scheduler
    items: deque[tuple[object, Message]] = field(default_factory=deque)
    is_woken: bool = False
    waiter: Task | None = None

    def put(self, sender: object, message: Message) -> None:
        self.items.append((sender, message))
        self.signal()

    def wake(self) -> None:
        self.is_woken = True
        self.signal()

    def signal(self) -> None:
        if self.waiter is not None:
            self.scheduler.wake(self.waiter)

    def take(self, timeout_s: float) -> tuple[object, Message] | None:
        if not self.items and not self.is_woken and timeout_s > 0:
            self.waiter = self.scheduler.current()
            try:
                self.scheduler.wait(timeout_s)
            finally:
                self.waiter = None
        if self.items:
            return self.items.popleft()
        self.is_woken = False
        return None


@dataclass
class SimulatedNetwork:
    """The network of all processes.

    Attributes:
        trace: called with a line for each message sent or lost.
        before: called with the sender before it sends a message; may kill it.
    """

    scheduler: Scheduler
    weather: Weather
    trace: Callable[[str], None]
    before: Callable[[Process], None] = lambda _: None
    listeners: dict[str, "SimulatedListener"] = field(default_factory=dict)
    lines: list["Line"] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def of(self, process: Process) -> "ProcessNetwork":
        return ProcessNetwork(self, process)

    def new_peer(self) -> Peer:
        return b"%d" % next(self._numbers)

    def reset(self, process: str, endpoint: str) -> None:
        """Breaks all connections between a process and a server."""
        for line in list(self.lines):
            if line.owner.process.name == process and line.endpoint == endpoint:
                line.reset()

    def lose(self, process: Process) -> None:
        """Breaks all connections of a killed process."""
        for line in list(self.lines):
            if line.owner.process is process:
                line.close()
            elif (
                line.endpoint in self.listeners and self.listeners[line.endpoint].process is process
            ):
                line.reset()
        for endpoint, listener in list(self.listeners.items()):
            if listener.process is process:
                del self.listeners[endpoint]

    def carry(
        self, sender: str, receiver: str, message: Message, line: "Line", *, to_server: bool
    ) -> None:
        """Delivers a message later, unless it is lost."""
        now_s = self.scheduler.now_s
        fate = self.weather.fate(now_s, sender, receiver, message.kind)
        lost = "" if fate.delays_s else " lost"
        self.trace(f"{now_s:.6f} {sender} > {receiver} {described(message)}{lost}")
        if message.tensors:
            message = replace(message, tensors=tuple(map(_read_only, message.tensors)))
        for delay_s in fate.delays_s:
            line.send(message, fate.held_s + delay_s, to_server=to_server)


def described(message: Message) -> str:
    """Describes a message with a checksum of its arrays."""
    body = {name: value for name, value in message.body.items() if name not in _UNTRACED}
    crc = 0
    for tensor in message.tensors:
        crc = zlib.crc32(tensor.array.tobytes(), zlib.crc32(tensor.name.encode(), crc))
    what = f"{message.kind.value} step {message.step} #{message.number}"
    return f"{what} {body} {crc:08x}" if message.kind is not Kind.DEFINE else f"{what} {crc:08x}"


def _read_only(tensor: Tensor) -> Tensor:
    array = tensor.array.view()
    array.flags.writeable = False
    return Tensor(tensor.name, array)


@dataclass(eq=False)
class Line:
    """The connection of a client to one server."""

    network: SimulatedNetwork
    owner: "SimulatedConnections"
    server: int
    endpoint: str
    peer: Peer
    generation: int = 0
    is_open: bool = True
    was_open: bool = False
    is_renewed: bool = False
    _last_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # by direction
    _queued: deque[Message] = field(default_factory=deque)  # until there is a listener

    def send(self, message: Message, delay_s: float, *, to_server: bool) -> None:
        if to_server and (not self.is_open or self.endpoint not in self.network.listeners):
            self._queued.append(message)
            return
        scheduler, generation = self.network.scheduler, self.generation
        at_s = max(scheduler.now_s + delay_s, self._last_s[to_server])
        self._last_s[to_server] = at_s
        self.was_open = True

        def arrive() -> None:
            if generation != self.generation:
                return
            if not to_server:
                self.owner.inbox.put(self.server, message)
            elif (listener := self.network.listeners.get(self.endpoint)) is not None:
                listener.put(self, message)

        scheduler.after(at_s - scheduler.now_s, arrive)

    def reset(self) -> None:
        """Breaks the connection, which opens again soon."""
        self._end()
        self.generation += 1
        self.is_open = False
        self._last_s = [0.0, 0.0]
        self.peer = self.network.new_peer()
        generation = self.generation
        self.network.scheduler.after(_REOPEN_S, lambda: self.open(generation))

    def open(self, generation: int) -> None:
        """Opens a broken connection if there is a listener, and sends what waited."""
        if generation != self.generation or self.endpoint not in self.network.listeners:
            return
        self.is_renewed = self.is_renewed or self.was_open
        self.is_open = True
        queued, self._queued = self._queued, deque()
        for message in queued:
            self.send(message, Weather.SHORT_S, to_server=True)

    def _end(self) -> None:
        """Lets the server know that the peer's connection has ended."""
        if (listener := self.network.listeners.get(self.endpoint)) is not None:
            listener.note_end(self.peer)

    def leave(self) -> None:
        """Closes the connection at its client; what was sent still arrives, but no answer does."""
        if self in self.network.lines:
            self.network.lines.remove(self)
            self.network.scheduler.after(2 * Weather.SHORT_S, self._end)

    def close(self) -> None:
        """Closes the connection of a killed process."""
        self._end()
        self.generation += 1
        self._queued.clear()
        if self in self.network.lines:
            self.network.lines.remove(self)


@dataclass
class ProcessNetwork:
    """The network as one process uses it."""

    network: SimulatedNetwork
    process: Process

    def connect(self, endpoints: Sequence[str]) -> "SimulatedConnections":
        return SimulatedConnections(self.network, self.process, endpoints)

    def listen(self, endpoint: str) -> "SimulatedListener":
        if endpoint in self.network.listeners:
            raise ConnectError(f"{endpoint} is taken", hint="kill its server first")
        listener = SimulatedListener(self.network, self.process, endpoint)
        self.network.listeners[endpoint] = listener
        for line in self.network.lines:
            if line.endpoint == endpoint:
                line.open(line.generation)
        return listener


class SimulatedConnections:
    """A client's connections to all servers."""

    def __init__(
        self, network: SimulatedNetwork, process: Process, endpoints: Sequence[str]
    ) -> None:
        self.network, self.process = network, process
        self.inbox = Inbox(network.scheduler)
        self._is_closed = False
        self._lines = [
            Line(network, self, server, endpoint, network.new_peer())
            for server, endpoint in enumerate(endpoints)
        ]
        network.lines += self._lines

    def send(self, server: int, message: Message) -> None:
        self._check_open()
        if self.process.is_alive:
            self.network.before(self.process)
            line = self._lines[server]
            name = self.network.listeners.get(line.endpoint)
            to = name.process.name if name is not None else f"server {server}"
            self.network.carry(self.process.name, to, message, line, to_server=True)

    def receive(self, timeout_s: float) -> tuple[int, Message] | None:
        self._check_open()
        found = self.inbox.take(timeout_s)
        self._check_open()
        if found is None:
            return None
        server, message = found
        assert isinstance(server, int)
        return server, message

    def renewed(self) -> Collection[int]:
        found = [line.server for line in self._lines if line.is_renewed]
        for server in found:
            self._lines[server].is_renewed = False
        return found

    def renew(self, server: int) -> None:
        """Does nothing: messages are lost here, and never damaged."""

    def close(self) -> None:
        self._is_closed = True
        for line in self._lines:
            line.leave()
        self.inbox.signal()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the connections to the servers are closed")


class SimulatedListener:
    """A server's end of its connections."""

    def __init__(self, network: SimulatedNetwork, process: Process, endpoint: str) -> None:
        self.network, self.process, self._endpoint = network, process, endpoint
        self.inbox = Inbox(network.scheduler)
        self._lines: dict[Peer, Line] = {}
        self._ended: list[Peer] = []
        self._is_closed = False

    def put(self, line: Line, message: Message) -> None:
        self._lines[line.peer] = line
        self.inbox.put(line.peer, message)

    def receive(self, timeout_s: float) -> tuple[Peer, Message] | None:
        self._check_open()
        found = self.inbox.take(timeout_s)
        self._check_open()
        if found is None:
            return None
        peer, message = found
        assert isinstance(peer, bytes)
        return peer, message

    def send(self, peer: Peer, message: Message) -> None:
        self._check_open()
        line = self._lines.get(peer)
        if line is not None and line.peer == peer and self.process.is_alive:
            to = line.owner.process.name
            self.network.carry(self.process.name, to, message, line, to_server=False)

    def trust(self, peer: Peer) -> None:
        """Does nothing: every peer is known."""

    def ended(self) -> Collection[Peer]:
        found, self._ended = self._ended, []
        return found

    def note_end(self, peer: Peer) -> None:
        if peer in self._lines:
            self._ended.append(peer)

    def wake(self) -> None:
        self.inbox.wake()

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def rejected(self) -> int:
        return 0

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self.network.listeners.get(self._endpoint) is self:
                del self.network.listeners[self._endpoint]
            self.inbox.signal()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the listener at {self._endpoint} is closed")

"""A network inside one process, with a deterministic scheduler and a virtual clock.

::

    network = MemoryNetwork()
    network.run({"server 0": server.serve, "trainer 0": train, "trainer 1": train})

The scheduler runs participants one at a time, each until it waits. Then the next participant, in
order, whose condition holds runs; if there is none, the clock jumps to the earliest deadline. So a
deadline of ten seconds costs nothing, and a program that passes once always passes.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from jaxfleet.errors import ClosedError, ConnectError
from jaxfleet.transport.codec import decode, encode
from jaxfleet.transport.messages import Limits, Message, Peer, Tensor

_TICK_S = 1e-3  # minimum duration of a timed-out wait, so that polling terminates


@dataclass(eq=False)
class _Participant:
    name: str
    body: Callable[[], Any]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] = lambda: True
    deadline_s: float = 0.0
    done: bool = False
    result: Any = None


class DeterministicScheduler:
    """Passes control among participants.

    Outside `run` the caller is the only participant: a wait whose condition does not hold ends at
    once, and the clock advances.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._participants: list[_Participant] = []
        self._by_thread: dict[int, _Participant] = {}
        self._failure: BaseException | None = None
        self._stopped = False
        self._all_done = threading.Event()

    def clock(self) -> float:
        """Returns the virtual time in seconds, which advances only while all participants wait."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Lets the others run for this many seconds of virtual time."""
        self.wait(lambda: False, seconds)

    def run(
        self, bodies: Mapping[str, Callable[[], Any]], *, longest_s: float = 100.0
    ) -> dict[str, Any]:
        """Runs the participants' bodies to completion, one at a time, and returns their results.

        They start in the given order, and each runs until it waits in `receive` or `sleep`. The
        first exception in one ends the others with a ClosedError where they wait, and is raised
        here.

        Raises:
            ConnectError: they ran for more than `longest_s` real seconds.
        """
        if self._participants:
            raise ClosedError("participants are running already", hint="call run once at a time")
        self._participants = [_Participant(name, body) for name, body in bodies.items()]
        self._failure, self._stopped = None, False
        self._all_done.clear()
        everyone = self._participants
        try:
            for one in everyone:
                threading.Thread(target=self._live, args=(one,), name=one.name, daemon=True).start()
            self._pass_on(-1)
            if not self._all_done.wait(longest_s):
                running = ", ".join(one.name for one in everyone if not one.done)
                raise ConnectError(f"after {longest_s:g} s these still ran: {running}")
        finally:
            self._stopped = True
            self._participants = []
            for one in everyone:
                one.turn.release()  # after a timeout, ends those that still wait
        if self._failure is not None:
            raise self._failure
        return {one.name: one.result for one in everyone}

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Lets other participants run until `ready` holds or the timeout expires."""
        deadline_s = self._now_s + max(timeout_s, _TICK_S)
        me = self._by_thread.get(threading.get_ident())
        if me is None:
            if not ready():
                self._now_s = deadline_s
            return
        self._check_running()
        me.ready, me.deadline_s = ready, deadline_s
        self._pass_on(self._participants.index(me))
        me.turn.acquire()
        self._check_running()

    def _check_running(self) -> None:
        if self._stopped:
            raise ClosedError("another participant of the network failed")

    def _live(self, me: _Participant) -> None:
        me.turn.acquire()
        self._by_thread[threading.get_ident()] = me
        everyone = self._participants
        try:
            if not self._stopped:
                me.result = me.body()
        except BaseException as failure:  # noqa: BLE001  `run` raises it in its caller's thread
            if not self._stopped:
                self._failure, self._stopped = failure, True
        finally:
            del self._by_thread[threading.get_ident()]
            me.done = True
            if self._participants is everyone:
                self._pass_on(everyone.index(me))

    def _pass_on(self, index: int) -> None:
        """Gives control to the next participant after `index`, possibly the same one."""
        order = self._participants[index + 1 :] + self._participants[: index + 1]
        waiting = [one for one in order if not one.done]
        if not waiting:
            self._all_done.set()
            return
        following = next((one for one in waiting if self._stopped or one.ready()), None)
        if following is None:
            following = min(waiting, key=lambda one: one.deadline_s)  # the first of equals
            self._now_s = max(self._now_s, following.deadline_s)
        following.turn.release()


Faults: TypeAlias = Callable[[str, Message], int]
"""Says how many copies of a message arrive: 0 loses it. Given the server's endpoint, whichever way
the message goes; `Message.sender` names it."""


class MemoryNetwork(DeterministicScheduler):
    """Carries messages between threads that take turns.

    A message to an endpoint without a listener waits for one, as on the real network; a message
    unread when the listener closes is lost. Arrays are shared, and read-only at the receiver.

    Args:
        through_wire: encode and decode every message, which copies it.
        faults: loses or duplicates messages.
        limits: maximum message sizes, with `through_wire`.
    """

    def __init__(
        self,
        *,
        through_wire: bool = False,
        faults: Faults | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__()
        self._through_wire = through_wire
        self._faults = faults
        self._limits = limits or Limits()
        self._listeners: dict[str, MemoryListener] = {}
        self._early: dict[str, deque[tuple[MemoryConnections, int, Message]]] = {}
        self._numbers = 0

    def connect(self, endpoints: Sequence[str]) -> "MemoryConnections":
        return MemoryConnections(self, endpoints)

    def listen(self, endpoint: str) -> "MemoryListener":
        host, _, port = endpoint.rpartition(":")
        if port == "0":
            endpoint = f"{host}:{self.new_number()}"
        if endpoint in self._listeners:
            raise ConnectError(f"{endpoint} is taken", hint="port 0 takes a free one")
        listener = MemoryListener(self, endpoint)
        self._listeners[endpoint] = listener
        for connections, server, message in self._early.pop(endpoint, ()):
            listener.put(connections, server, message)
        return listener

    def new_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def to_server(self, connections: "MemoryConnections", server: int, message: Message) -> None:
        """Delivers a message to a listener, or queues it for a future one."""
        endpoint = connections.endpoints[server]
        for copy in self.carried(endpoint, message):
            if (listener := self._listeners.get(endpoint)) is not None:
                listener.put(connections, server, copy)
            else:
                self._early.setdefault(endpoint, deque()).append((connections, server, copy))

    def carried(self, endpoint: str, message: Message) -> list[Message]:
        """Returns the copies of a message that arrive."""
        copies = 1 if self._faults is None else self._faults(endpoint, message)
        if self._through_wire:
            frames = encode(message, limits=self._limits)
            return [decode([bytes(frame) for frame in frames], self._limits)] * copies
        return [replace(message, tensors=tuple(map(_read_only, message.tensors)))] * copies

    def forget(self, endpoint: str) -> None:
        self._listeners.pop(endpoint, None)


def _read_only(tensor: Tensor) -> Tensor:
    array = tensor.array.view()
    array.flags.writeable = False
    return Tensor(tensor.name, array)


class MemoryConnections:
    """A participant's connections to servers."""

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

    def renew(self, server: int) -> None:
        """Does nothing: what is sent arrives."""

    def put(self, server: int, message: Message) -> None:
        if not self._closed:
            self._queue.append((server, message))

    @property
    def is_closed(self) -> bool:
        return self._closed

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
        self._connections: dict[Peer, tuple[MemoryConnections, int]] = {}
        self._peers: dict[tuple[int, int], Peer] = {}
        self._ended: set[Peer] = set()  # of which the caller has been told
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
        if (found := self._connections.get(peer)) is not None:
            connections, server = found
            for copy in self._network.carried(self._endpoint, message):
                connections.put(server, copy)

    def trust(self, _: Peer) -> None:
        """Does nothing: every peer is known."""

    def ended(self) -> Collection[Peer]:
        found = {peer for peer, (line, _) in self._connections.items() if line.is_closed}
        fresh, self._ended = found - self._ended, found
        return fresh

    def put(self, connections: MemoryConnections, server: int, message: Message) -> None:
        key = (id(connections), server)  # `_connections` keeps them alive, so the id is stable
        if key not in self._peers:
            peer = b"%d" % self._network.new_number()
            self._peers[key], self._connections[peer] = peer, (connections, server)
        self._queue.append((self._peers[key], message))

    def wake(self) -> None:
        self._woken = True

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def rejected(self) -> int:
        return 0  # only valid messages are sent here

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

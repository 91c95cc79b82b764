"""The launch of a simulated job: it is asked for other numbers of servers, and the job moves.

What decides is the launch's own code, `jaxfleet.launch.server_scaling`: it asks server 0 whether
the job can move, starts new servers and waits until they listen, asks for the move, and asks again
until the job has moved; then servers that do not stay are forgotten, and ended if they were started
again meanwhile. Simulated are what it needs of the machine: processes, ports, threads and its queue
of events, whose actions are carried out at once.

Like the user of `jaxfleet scale`, a `Move` asks again while the launch refuses or gets no answer.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from unittest import mock

from jaxfleet.env import MOVING
from jaxfleet.errors import JaxfleetError
from jaxfleet.launch import server_scaling
from jaxfleet.launch.job_spec import Job
from jaxfleet.launch.members import Members
from jaxfleet.launch.requests import Requests
from jaxfleet.launch.server_scaling import ServerScaling
from jaxfleet.launch.starter import Asked, Event, Events, Starter
from jaxfleet.passes.pserver.placement import local_endpoints
from jaxfleet.testing.simulation.faults import Move
from jaxfleet.testing.simulation.network import SimulatedNetwork
from jaxfleet.testing.simulation.scheduler import Process, Scheduler
from jaxfleet.testing.simulation.server_process import ServerProcess
from jaxfleet.testing.simulation.workload import NAME
from jaxfleet.transport.messages import Connections
from jaxfleet.transport.zmq import network as zmq_network

_AGAIN_S = 0.25  # after which a user repeats what the launch has refused
_LOOK_S = 0.5

_Result = TypeVar("_Result")


@dataclass
class LaunchedServers:
    """The servers of a launch, as its `Members`.

    Attributes:
        start: starts the process of a server, at the endpoint of its place.
        forget_disk: removes what an earlier server of a number has left.
        former: servers that the job does without.
    """

    endpoints: list[str]
    root: Path
    start: Callable[[int], None]
    forget_disk: Callable[[int], None]
    servers: dict[int, ServerProcess] = field(default_factory=dict)
    former: list[ServerProcess] = field(default_factory=list)
    start_number: int = 0
    planned_servers: int = 0

    @property
    def moving_folder(self) -> Path:
        return self.root / MOVING

    def add_servers(self, ports: "FreePorts") -> range:
        first = len(self.endpoints)
        self.endpoints += ports.endpoints
        added = range(first, len(self.endpoints))
        for number in added:
            self.forget_disk(number)
            self.start(number)
        return added

    def forget_server(self, number: int) -> ServerProcess:
        process = self.servers.pop(number)
        self.former.append(process)
        return process

    def drop_places(self, count: int) -> None:
        del self.endpoints[count:]

    def end_move(self) -> None:
        shutil.rmtree(self.moving_folder, ignore_errors=True)


@dataclass
class FreePorts:
    """Ports at which nothing listens, as `Ports`."""

    endpoints: tuple[str, ...]

    def close(self) -> None:
        """Holds nothing."""


class _EventsAtOnce(Events):
    """Carries requests out at once: a greenlet that runs is alone anyway."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def put(self, event: Event) -> None:
        assert isinstance(event, Asked)
        event.act()

    def put_later(self, event: Event, seconds: float) -> None:
        self._scheduler.after(seconds, partial(self.put, event))


class _RequestsAtOnce(Requests):
    def carry_out(self, act: Callable[[], _Result]) -> _Result:
        self.check()
        return act()


@dataclass
class _Connecting:
    """Makes a network of which a launch only uses `connect`."""

    connect: Callable[[Sequence[str]], Connections]

    def __call__(self, **_: object) -> "_Connecting":
        return self


class Launch:
    """Moves a job to other servers, as it is asked.

    Args:
        members: the servers that it has started.
        note: adds a line to the trace.
    """

    def __init__(
        self,
        members: LaunchedServers,
        network: SimulatedNetwork,
        scheduler: Scheduler,
        note: Callable[[str], None],
    ) -> None:
        self.members, self._network, self._scheduler = members, network, scheduler
        self._process = Process("launch")
        self._add = note
        console = SimpleNamespace(say=self._note, complain=self._note)
        events = _EventsAtOnce(scheduler)
        self._requests = _RequestsAtOnce(NAME, events)
        self._requests.is_open = True
        self._scaling = ServerScaling(
            Job(name=NAME, trainer=("script",)),
            cast(Members, members),
            cast(Starter, SimpleNamespace(console=console, events=events)),
            self._requests,
        )

    def _note(self, text: str) -> None:
        self._add(f"{self._scheduler.now_s:.6f} launch: {text}")

    def move(self, moves: Sequence[Move]) -> None:
        """Begins to ask for moves, one after the other."""
        if moves:
            self._scheduler.start(self._process, "launch", partial(self._ask_for, moves))

    def _ask_for(self, moves: Sequence[Move]) -> None:
        for move in moves:
            while self._scheduler.now_s < move.at_s and self._requests.is_open:
                self._scheduler.sleep(min(_LOOK_S, move.at_s - self._scheduler.now_s))
            while self._requests.is_open:
                try:
                    self._note(self._scaling.ask(move.servers))
                    break
                except JaxfleetError as error:
                    self._note(str(error))
                    self._scheduler.sleep(_AGAIN_S)

    def has_ended(self, server: ServerProcess) -> bool:
        """Takes the end of a server; whether it is to be started again if it was killed."""
        if not self.is_awaited(server):
            return False
        return not (server.status and self._scaling.failed_to_start(server.number))

    def is_awaited(self, server: ServerProcess) -> bool:
        """Whether a server that has ended is part of the job still."""
        is_here = self.members.servers.get(server.number) is server
        return is_here and not self._scaling.has_left(server.number)

    def close(self) -> None:
        """Ends servers to which the job has not moved: all trainers have ended."""
        if self._requests.is_open:
            self._requests.is_open = False
            self._scaling.end_unused()

    @contextmanager
    def substituted(self) -> Iterator[None]:
        """Replaces the machine in the modules of the launch."""
        scheduler, network = self._scheduler, self._network
        clock = SimpleNamespace(monotonic=scheduler.clock, sleep=scheduler.sleep)
        threads = SimpleNamespace(Thread=self._thread)
        connect = network.of(self._process).connect
        with (
            mock.patch.object(server_scaling, "time", clock),
            mock.patch.object(server_scaling, "threading", threads),
            mock.patch.object(server_scaling, "Ports", self._free_ports),
            mock.patch.object(zmq_network, "ZmqNetwork", _Connecting(connect)),
        ):
            yield

    def _thread(self, target: Callable[..., None], args: Sequence[Any], **_: bool) -> Any:
        def start() -> None:
            self._scheduler.start(self._process, "launch, which follows", partial(target, *args))

        return SimpleNamespace(start=start)

    def _free_ports(self, count: int, **_: str) -> FreePorts:
        taken = {*self.members.endpoints, *self._network.listeners}
        places = local_endpoints(len(taken) + count)
        return FreePorts(tuple([place for place in places if place not in taken][:count]))

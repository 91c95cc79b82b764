"""A whole job in this process, with its own clock, which tests disturb at chosen moments.

Programs, messages, servers, heartbeats and steps are real; the network is the memory network, so
runs are deterministic and a wait of seconds costs nothing. `cluster.py` starts jobs of processes.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxfleet.errors import ClosedError, JaxfleetError
from jaxfleet.lower import ExecutableCache
from jaxfleet.passes.pserver.placement import local_endpoints
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.heartbeat import Heartbeat
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.server import Server, ServerCore, ServerOptions
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.transport.memory_network import Faults, MemoryNetwork
from jaxfleet.transport.messages import Connections, Kind, Listener, Message, Peer
from tests.faults.cluster import LOST_S, STEP_S

CACHE = ExecutableCache()
NAME = "faults"
NEVER_S = 1e6
LONGEST_S = 200.0  # of real time; a run takes about a second

Moments = Mapping[tuple[int, int], Callable[[], None]]
"""Actions by a trainer and the number of the step that it has just finished."""


class KilledError(Exception):
    """Ends a process as SIGKILL does: without a bye.

    Args:
        away_s: after which a new process takes its place.
    """

    def __init__(self, away_s: float = NEVER_S) -> None:
        super().__init__()
        self.away_s = away_s


def kill(away_s: float = NEVER_S) -> None:
    """Kills the trainer that calls it; a new one takes its place after `away_s`, if given."""
    raise KilledError(away_s)


@dataclass
class End:
    """How a process ended.

    Attributes:
        error: of a process that failed.
        state: a trainer's final state by name.
        stats: a trainer's counters.
        at_s: when, on the job's clock.
    """

    error: BaseException | None = None
    state: dict[str, np.ndarray] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    at_s: float = 0.0


class MemoryJob:
    """A job of one script.

    Args:
        folder: where servers keep checkpoints; needed with `returns_s`.
        servers: the number of servers.
        more_servers: the number of those that wait until the job moves to them.
        trainers: the number of trainers.
        returns_s: how long trainers wait for a server; with it, servers keep checkpoints.
        step_s: the servers' limit for living peers.
        faults: loses or repeats messages.
        launch_id: of this launch of the job, or None.

    Attributes:
        ends: of all processes, by name.
        starts: the number of starts of each server.
        lives: the number of starts of each trainer.
        on_send: called before a trainer sends a message to a server; it may kill the trainer.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        servers: int = 2,
        more_servers: int = 0,
        trainers: int = 2,
        returns_s: float = 0.0,
        step_s: float = STEP_S,
        faults: Faults | None = None,
        launch_id: str | None = "first",
    ) -> None:
        assert folder is not None or not returns_s
        self.folder = folder if returns_s else None
        self.trainers, self.returns_s, self.step_s = trainers, returns_s, step_s
        self.expected = trainers  # by servers, when the job begins
        self.trainer_return_s: float | None = None
        self.launch_id = launch_id
        self.places = local_endpoints(servers + more_servers)
        self.endpoints = self.places[:servers]
        self.network = MemoryNetwork(faults=faults)
        self.ends: dict[str, End] = {}
        self.starts, self.lives = [0] * len(self.places), [0] * trainers
        self.on_send: Callable[[int, int, Message], None] = lambda *_: None
        self._listeners: dict[int, Listener] = {}
        self._away_s: dict[int, float] = {}
        self._still_until: dict[str, float] = {}
        self._beats: dict[int, list[Heartbeat]] = {}
        self.beating = 1  # clients of one process at a time
        self._moments: Moments = {}
        self._times: list[tuple[float, Callable[[], None]]] = []

    @abstractmethod
    def train(self, trainer: int) -> End:
        """Runs the script of a trainer; it calls `finished` after every step."""

    def run(self, at: Moments | None = None) -> Self:
        """Runs all processes to their ends.

        Args:
            at: actions by trainer and step.
        """
        self._moments = at or {}
        people: dict[str, Callable[[], None]] = {}
        for server in range(len(self.places)):
            people[f"server {server}"] = partial(self._serve, server)
        for trainer in range(self.trainers):
            people[f"trainer {trainer}"] = partial(self._train, trainer)
            for which in range(self.beating):
                people[f"heartbeat {trainer}.{which}"] = partial(self._beat, trainer)
        for number, (seconds, action) in enumerate(self._times):
            people[f"action {number}"] = partial(self._act, seconds, action)
        self.network.run(people, longest_s=LONGEST_S)
        return self

    def at_s(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedules an action on the job's clock."""
        self._times.append((seconds, action))

    def finished(self, trainer: int, step: int, pause_s: float = 0.0) -> None:
        """Runs the actions due after a trainer's step."""
        self.network.sleep(pause_s)
        if (action := self._moments.get((trainer, step))) is not None:
            action()

    # --- disturbances --------------------------------------------------------------------------

    def kill_server(self, server: int, *, away_s: float = NEVER_S) -> None:
        """Kills a server at once; a new one replaces it after `away_s`, if that is given."""
        self._away_s[server] = away_s
        self._listeners[server].close()

    def stop(self, name: str, seconds: float) -> None:
        """Suspends a process, including its heartbeats."""
        self._still_until[name] = self.network.clock() + seconds

    def stand(self, name: str) -> None:
        """Waits while a process is suspended."""
        while (left_s := self._still_until.get(name, 0.0) - self.network.clock()) > 0:
            self.network.sleep(left_s)

    # --- results -------------------------------------------------------------------------------

    def results(self) -> list[dict[str, np.ndarray]]:
        """Returns the final states of all trainers; fails unless all processes succeeded."""
        for name, end in self.ends.items():
            assert end.error is None, f"{name} ended with {end.error!r}"
        return [self.ends[f"trainer {number}"].state for number in range(self.trainers)]

    def error(self, name: str, kind: type[BaseException] = JaxfleetError) -> str:
        """Returns the error of a process; fails unless it has this type."""
        error = self.ends[name].error
        assert isinstance(error, kind), f"{name} ended with {error!r}"
        return str(error)

    # --- the processes -------------------------------------------------------------------------

    def client(
        self,
        me: TrainerIdentity,
        timeouts: Timeouts,
        replay_bytes: int,
        process: int | None = None,
    ) -> Client:
        """Returns a trainer's connections, and starts their heartbeats.

        `process` is its number when it began, by default as now.
        """
        process = me.trainer if process is None else process
        network = StoppingNetwork(self, f"trainer {process}", process)
        beats = Heartbeat(
            network,
            me.endpoints,
            sender=me.name,
            session=me.session,
            every_s=min(1.0, timeouts.lost_after_s / 5),
            clock=self.network.clock,
            thread=False,
        )
        self._beats.setdefault(process, []).append(beats)
        return Client(
            network.connect(me.endpoints),
            me,
            timeouts=timeouts,
            heartbeat=beats,
            replay_bytes=replay_bytes if self.returns_s else 0,
            clock=self.network.clock,
        )

    def _act(self, seconds: float, action: Callable[[], None]) -> None:
        self.network.sleep(seconds)
        action()

    def _train(self, trainer: int) -> None:
        def body() -> End:
            while True:
                self.lives[trainer] += 1
                try:
                    return self.train(trainer)
                except KilledError as killed:
                    if killed.away_s >= NEVER_S:
                        raise
                    self.network.sleep(killed.away_s)

        self._end(f"trainer {trainer}", body)

    def _beat(self, trainer: int) -> None:
        name = f"trainer {trainer}"
        while name not in self.ends:
            self.network.wait(lambda: bool(self._beats.get(trainer)) or name in self.ends, NEVER_S)
            if waiting := self._beats.get(trainer):
                waiting.pop(0).run()

    def _serve(self, server: int) -> None:
        def body() -> End:
            while (end := self._serve_once(server)) is None:
                if (away_s := self._away_s.pop(server)) >= NEVER_S:
                    return End(KilledError())
                self.network.sleep(away_s)
            return end

        self._end(f"server {server}", body)

    def _serve_once(self, server: int) -> End | None:
        """Serves until the job ends; None if the server was killed."""
        options = ServerOptions(
            server=server,
            job=NAME,
            launch_id=self.launch_id,
            trainers=self.expected,
            lost_after_s=LOST_S,
            step_timeout_s=self.step_s,
            server_return_s=self.returns_s,
            trainer_return_s=self.trainer_return_s,
            checkpoint_dir=self.folder,
        )
        network, clock = StoppingNetwork(self, f"server {server}"), self.network.clock
        core = ServerCore(self.places[server], CACHE, clock, options)
        self._listeners[server] = listener = network.listen(self.places[server])
        self.starts[server] += 1
        served = partial(Server, connect=network.connect, clock=clock, threaded=False)
        try:
            served(core, listener).serve()
            while (members := core.next_members) is not None:  # as `ps.server.process.serve`
                core = ServerCore(self.places[server], CACHE, clock, options)
                core.expect(members)
                served(core, listener).serve()
        except ClosedError:
            if server not in self._away_s:
                raise
            return None
        return None if server in self._away_s else End(core.failure)

    def _end(self, name: str, body: Callable[[], End]) -> None:
        try:
            end = body()
        except Exception as error:  # noqa: BLE001  # tests look at it
            end = End(error)
        end.at_s = self.network.clock()
        self.ends[name] = end


@dataclass
class StoppingNetwork:
    """The network of a process that may be suspended."""

    job: MemoryJob
    name: str
    trainer: int | None = None

    def connect(self, endpoints: Sequence[str]) -> Connections:
        lines = self.job.network.connect(endpoints)
        return StoppingLines(self.job, self.name, lines, self.trainer)

    def listen(self, endpoint: str) -> Listener:
        return StoppingListener(self.job, self.name, self.job.network.listen(endpoint))


@dataclass
class StoppingLines:
    """Connections that neither send nor receive while their process is suspended."""

    job: MemoryJob
    name: str
    lines: Connections
    trainer: int | None = None

    def send(self, server: int, message: Message) -> None:
        self.job.stand(self.name)
        if self.trainer is not None and message.kind is not Kind.HEARTBEAT:
            self.job.on_send(self.trainer, server, message)
        self.lines.send(server, message)

    def receive(self, timeout_s: float) -> tuple[int, Message] | None:
        self.job.stand(self.name)
        found = self.lines.receive(timeout_s)
        self.job.stand(self.name)
        return found

    def renewed(self) -> Collection[int]:
        return self.lines.renewed()

    def renew(self, server: int) -> None:
        self.lines.renew(server)

    def close(self) -> None:
        self.lines.close()


@dataclass
class StoppingListener:
    """A listener that neither sends nor receives while its process is suspended."""

    job: MemoryJob
    name: str
    listener: Listener

    def receive(self, timeout_s: float) -> tuple[Peer, Message] | None:
        self.job.stand(self.name)
        found = self.listener.receive(timeout_s)
        self.job.stand(self.name)
        return found

    def send(self, peer: Peer, message: Message) -> None:
        self.listener.send(peer, message)

    def trust(self, peer: Peer) -> None:
        self.listener.trust(peer)

    def ended(self) -> Collection[Peer]:
        return self.listener.ended()

    def wake(self) -> None:
        self.listener.wake()

    @property
    def endpoint(self) -> str:
        return self.listener.endpoint

    @property
    def rejected(self) -> int:
        return self.listener.rejected

    def close(self) -> None:
        self.listener.close()


def kill_before(job: MemoryJob, trainer: int, number: int) -> None:
    """Kills a trainer before its nth message to any server."""
    sent = 0

    def look(sender: int, _server: int, _message: Message) -> None:
        nonlocal sent
        if sender == trainer:
            sent += 1
            if sent == number:
                kill()

    job.on_send = look


def kill_again(job: MemoryJob, trainer: int, lives: Sequence[int], away_s: float) -> None:
    """Kills each process of a trainer before so many messages, and one more goes on each time."""
    sent = 0

    def look(sender: int, _server: int, _message: Message) -> None:
        nonlocal sent
        if sender == trainer:
            sent += 1
            if (life := job.lives[trainer]) <= len(lives) and sent == lives[life - 1]:
                sent = 0
                kill(away_s)

    job.on_send = look


def forget_killed(job: MemoryJob) -> int:
    """Forgets the processes that were killed; returns their number."""
    killed = [name for name, end in job.ends.items() if isinstance(end.error, KilledError)]
    for name in killed:
        del job.ends[name]
    return len(killed)

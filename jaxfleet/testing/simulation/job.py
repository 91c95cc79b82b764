"""Runs one schedule: the processes of a job, and the faults that happen to them."""

import gc
import hashlib
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from jaxfleet.errors import ClosedError
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.heartbeat import Heartbeat
from jaxfleet.ps.server import Server, ServerCore, ServerOptions
from jaxfleet.runtime.pserver_job import JobPrograms, membership, timeouts_of
from jaxfleet.tables.buckets import server_of
from jaxfleet.testing.simulation import workload
from jaxfleet.testing.simulation.disk import Disk
from jaxfleet.testing.simulation.faults import (
    ClockJump,
    FullDisk,
    KillServer,
    KillTrainer,
    Reset,
    Stop,
    Weather,
)
from jaxfleet.testing.simulation.network import SimulatedNetwork
from jaxfleet.testing.simulation.schedule import RETURNS_S, Schedule
from jaxfleet.testing.simulation.scheduler import KilledError, Process, Scheduler, StuckError
from jaxfleet.testing.simulation.substitutes import substituted
from jaxfleet.testing.simulation.task_queue import TaskQueue
from jaxfleet.testing.simulation.watch import Sizes, Waits, WatchedClient

_LIMIT_S, _REAL_S = 400.0, 60.0
_ROOT = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  # fsync costs nothing there


@dataclass
class ServerEnd:
    """How a server ended, for the last time.

    Attributes:
        values: its parameters, by leaf.
        rows: the rows of its table by key.
        starts: how often it was started.
        is_up: it runs, so that it can be killed.
    """

    error: BaseException | None = None
    values: dict[str, np.ndarray] = field(default_factory=dict)
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    starts: int = 0
    is_up: bool = False


@dataclass
class Run:
    """The result of a schedule.

    Attributes:
        trainers: what each trainer saw.
        errors: by trainer, the error that ended it.
        crashes: errors that no process caught, by the name of the thread.
        stuck: why the run did not end by itself, if so.
        digest: of all messages.
    """

    schedule: Schedule
    trainers: list[workload.Record]
    servers: list[ServerEnd]
    waits: Waits = field(default_factory=Waits)
    sizes: Sizes = field(default_factory=Sizes)
    errors: dict[int, BaseException] = field(default_factory=dict)
    crashes: list[tuple[str, BaseException]] = field(default_factory=list)
    stuck: str = ""
    took_s: float = 0.0
    messages: int = 0
    digest: str = ""


def run_schedule(schedule: Schedule, trace: Callable[[str], None] | None = None) -> Run:
    """Runs a schedule to its end."""
    root = Path(tempfile.mkdtemp(prefix="jaxfleet-simulation-", dir=_ROOT))
    job = Job(schedule, root, trace)
    try:
        with _uncollected(), substituted(job.scheduler.clock, job.draw("machine"), job.disk_of):
            job.run()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return job.result


@contextmanager
def _uncollected() -> Iterator[None]:
    """Defers garbage collection to the end of a run: 8 % of its time, and at any point of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Job:
    """The processes of a schedule."""

    def __init__(
        self, schedule: Schedule, root: Path, trace: Callable[[str], None] | None = None
    ) -> None:
        self.schedule, self.mode, self.root = schedule, schedule.mode, root
        self.endpoints = workload.endpoints_of(self.mode)
        self.scheduler = Scheduler()
        self.result = Run(
            schedule,
            [workload.Record()] * workload.TRAINERS,
            [ServerEnd() for _ in self.endpoints],
        )
        self._trace, self._digest = trace, hashlib.blake2b(digest_size=16)
        weather = Weather(schedule.seed, schedule.faults)
        self.network = SimulatedNetwork(self.scheduler, weather, self.note, self._before_message)
        self.processes: dict[str, Process] = {}
        self.disks = [
            Disk(
                f"server {n}",
                root / f"server{n}",
                root / "shared",
                self.draw(f"disk {n}"),
                partial(self._crash, n),
            )
            for n in range(len(self.endpoints))
        ]
        self._kills: dict[int, list[KillServer]] = {n: [] for n in range(len(self.endpoints))}
        self._dying: dict[int, KillServer] = {}
        self._sent: Counter[str] = Counter()  # messages by process
        self._lives: Counter[int] = Counter()  # starts of trainers

    def draw(self, what: str) -> random.Random:
        """Returns a generator for one purpose, so that no other changes what it draws."""
        return random.Random(f"{self.schedule.seed}/{what}")  # noqa: S311  # not for secrets

    def note(self, line: str) -> None:
        """Adds a line to the trace."""
        self.result.messages += 1
        self._digest.update(line.encode())
        if self._trace is not None:
            self._trace(line)

    def disk_of(self, path: str) -> Disk | None:
        process = self.scheduler.process
        if process is None or not process.is_alive:
            return None  # the handlers of a killed process change nothing
        disk = next((disk for disk in self.disks if disk.process == process.name), None)
        return disk if disk is not None and disk.has(path) else None

    def run(self) -> None:
        for number in range(len(self.endpoints)):
            self._start_server(number)
        for number in range(workload.TRAINERS):
            self._start_trainer(number)
        for fault in self.schedule.faults.values():
            self._plan(fault)
        try:
            self.scheduler.run(limit_s=_LIMIT_S, real_s=_REAL_S)
        except StuckError as error:
            self.result.stuck = str(error)
        self.result.crashes = self.scheduler.crashes
        self.result.took_s = self.scheduler.now_s
        self.result.digest = self._digest.hexdigest()

    # --- faults -----------------------------------------------------------------------------------

    def _plan(self, fault: object) -> None:
        after = self.scheduler.after
        match fault:
            case Reset():
                endpoint = self.endpoints[fault.server]
                after(fault.at_s, lambda: self.network.reset(f"trainer {fault.trainer}", endpoint))
            case KillServer(at_s=None):
                self._kills[fault.server].append(fault)
                self._arm(fault.server)
            case KillServer(at_s=float(at_s)):
                after(at_s, lambda: self._kill_server(fault))
            case KillTrainer(at_s=float(at_s)):
                after(at_s, lambda: self._kill_trainer(fault))
            case Stop():
                after(fault.at_s, lambda: self._stop(fault.process, fault.for_s))
            case ClockJump():
                after(fault.at_s, lambda: self._jump(fault.process, fault.by_s))
            case FullDisk():
                disk = self.disks[fault.server]
                after(fault.at_s, lambda: setattr(disk, "is_full", True))
                after(fault.at_s + fault.for_s, lambda: setattr(disk, "is_full", False))
            case _:
                pass  # of messages

    def _arm(self, server: int) -> None:
        """Lets the next kill during an operation of a server's disk happen."""
        disk = self.disks[server]
        if self._kills[server] and disk.crash_at is None:
            kill = self._kills[server].pop(0)
            assert kill.at_operation is not None
            self._dying[server] = kill
            disk.crash_at = disk.operations + kill.at_operation

    def _crash(self, server: int) -> None:
        self._kill_server(self._dying.pop(server))
        raise KilledError

    def _kill_server(self, kill: KillServer) -> None:
        process = self.processes[f"server {kill.server}"]
        if not process.is_alive or not self.result.servers[kill.server].is_up:
            return
        self.note(f"{self.scheduler.now_s:.6f} {process.name} is killed")
        tree = self.disks[kill.server].tree(loses_power=kill.loses_power)
        self.scheduler.kill(process)
        self.network.lose(process)
        self.result.servers[kill.server].is_up = False

        def come_back() -> None:
            self.disks[kill.server].put_back(tree)
            self._start_server(kill.server)
            self._arm(kill.server)

        # Not at once: the killed process runs its handlers.
        self.scheduler.after(max(kill.away_s, 0.01), come_back, keeps=True)

    def _before_message(self, process: Process) -> None:
        number = self._sent[process.name]
        self._sent[process.name] += 1
        for fault in self.schedule.faults.values():
            match fault:
                case KillTrainer(at_message=int(at)) if at == number:
                    if process.name == f"trainer {fault.trainer}":
                        self._kill_trainer(fault)
                        if not process.is_alive:
                            raise KilledError
                case _:
                    pass

    def _kill_trainer(self, kill: KillTrainer) -> None:
        trainer, process = kill.trainer, self.processes[f"trainer {kill.trainer}"]
        if not process.is_alive or self.result.trainers[trainer].final:
            return
        self.note(f"{self.scheduler.now_s:.6f} {process.name} is killed")
        self.scheduler.kill(process)
        self.network.lose(process)
        if kill.away_s is not None:
            self.scheduler.after(kill.away_s, lambda: self._start_trainer(trainer), keeps=True)

    def _stop(self, name: str, seconds: float) -> None:
        process = self.processes[name]
        process.stopped_until = max(process.stopped_until, self.scheduler.now_s + seconds)
        self.result.waits.excused_s += seconds

    def _jump(self, name: str, seconds: float) -> None:
        self.processes[name].ahead_s += seconds
        self.result.waits.excused_s += seconds

    # --- processes --------------------------------------------------------------------------------

    def _start_server(self, server: int) -> None:
        process = self.processes[f"server {server}"] = Process(f"server {server}")
        end = self.result.servers[server]
        end.starts += 1
        end.is_up, end.error = True, None
        self.scheduler.start(process, process.name, lambda: self._serve(process, server, end))

    def _serve(self, process: Process, server: int, end: ServerEnd) -> None:
        keeps = self.schedule.keeps_checkpoints
        options = ServerOptions(
            server=server,
            job=workload.NAME,
            launch_id="first",
            trainers=workload.TRAINERS,
            lost_after_s=workload.LOST_AFTER_S,
            step_timeout_s=workload.STEP_TIMEOUT_S,
            connect_s=workload.CONNECT_S,
            server_return_s=RETURNS_S if keeps else 0.0,
            checkpoint_dir=self.root if keeps else None,
        )
        network, clock = self.network.of(process), self.scheduler.clock
        core = None
        try:
            core = ServerCore(self.endpoints[server], workload.cache(), clock, options)
            served = Server(
                core,
                network.listen(self.endpoints[server]),
                connect=network.connect,
                clock=clock,
                make_worker=partial(
                    TaskQueue, self.scheduler, self.draw(f"worker {server} of start {end.starts}")
                ),
                publish=partial(self.result.sizes.look_at_server, core),
            )
            served.serve()
        except ClosedError as error:
            end.error = error if process.is_alive else None
        except Exception as error:  # noqa: BLE001  # the invariants judge it
            end.error = error
        if core is not None and process.is_alive:
            end.is_up = False  # an ended server is not started again
            end.error = end.error or core.failure
            end.values = _values(core)
            for store in core.stores.values():
                keys = workload.KEYS[server_of(workload.KEYS, len(self.endpoints)) == server]
                rows = store.look_up(keys)
                end.rows = {int(k): np.array(x) for k, x in zip(keys, rows, strict=True)}

    def _start_trainer(self, trainer: int) -> None:
        process = self.processes[f"trainer {trainer}"] = Process(f"trainer {trainer}")
        record = self.result.trainers[trainer] = workload.Record()
        life, self._lives[trainer] = self._lives[trainer], self._lives[trainer] + 1
        self.result.errors.pop(trainer, None)

        def body() -> None:
            pace_s = self.schedule.pace_s[trainer]
            try:
                workload.train(
                    self.mode,
                    trainer,
                    lambda job: self._connect(process, trainer, life, job),
                    record,
                    pause=lambda _: self.scheduler.sleep(pace_s),
                    folder=self.root / "shared",
                )
            except Exception as error:  # noqa: BLE001  # the invariants judge it
                self.result.errors[trainer] = error

        self.scheduler.start(process, process.name, body)

    def _connect(self, process: Process, trainer: int, life: int, job: JobPrograms) -> Client:
        me = membership(
            job,
            name=workload.NAME,
            trainer=trainer,
            trainers=workload.TRAINERS,
            endpoints=self.endpoints,
            life=life,
        )
        returns_s = RETURNS_S if self.schedule.keeps_checkpoints else 0.0
        timeouts = timeouts_of(workload.strategy_of(self.mode), server_return_s=returns_s)
        network, clock = self.network.of(process), self.scheduler.clock
        beats = Heartbeat(
            network,
            self.endpoints,
            sender=me.name,
            session=me.session,
            every_s=min(1.0, timeouts.lost_after_s / 5),
            clock=clock,
            thread=False,
        )
        self.scheduler.start(process, f"heartbeat {trainer}", beats.run)
        client = WatchedClient(
            network.connect(self.endpoints),
            me,
            timeouts=timeouts,
            heartbeat=beats,
            replay_bytes=workload.REPLAY_BYTES if returns_s else 0,
            clock=clock,
        )
        client.watch(self.result.waits, self.result.sizes, self.scheduler)
        return client


def _values(core: ServerCore) -> dict[str, np.ndarray]:
    return {name.rpartition("/")[2]: np.array(value) for name, value in core.state.items()}

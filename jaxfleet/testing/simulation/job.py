"""Runs one schedule: the processes of a job, and the faults that happen to them."""

import gc
import hashlib
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from jaxfleet.errors import ClosedError
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.heartbeat import Heartbeat
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.membership import Membership
from jaxfleet.ps.server import Server, ServerCore, ServerOptions
from jaxfleet.runtime.pserver_job import JobPrograms, membership, timeouts_of
from jaxfleet.runtime.trainer_membership import Departure
from jaxfleet.tables.buckets import server_of
from jaxfleet.testing.simulation import workload
from jaxfleet.testing.simulation.disk import Disk
from jaxfleet.testing.simulation.faults import (
    ClockJump,
    FullDisk,
    Join,
    KillServer,
    KillTrainer,
    Leave,
    Reset,
    Stop,
    Weather,
)
from jaxfleet.testing.simulation.network import SimulatedNetwork
from jaxfleet.testing.simulation.place import Place
from jaxfleet.testing.simulation.run import Run, ServerEnd
from jaxfleet.testing.simulation.schedule import RETURNS_S, Schedule
from jaxfleet.testing.simulation.scheduler import KilledError, Process, Scheduler, StuckError
from jaxfleet.testing.simulation.substitutes import substituted
from jaxfleet.testing.simulation.task_queue import TaskQueue
from jaxfleet.testing.simulation.watch import WatchedClient

_LIMIT_S, _CPU_S = 400.0, 60.0
_ROOT = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  # fsync costs nothing there


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
        self._joins = sorted(x.at_s for x in schedule.faults.values() if isinstance(x, Join))
        self._leaves = {
            x.trainer: x.after_step for x in schedule.faults.values() if isinstance(x, Leave)
        }
        self.result = Run(
            schedule,
            [workload.Record() for _ in range(workload.TRAINERS + len(self._joins))],
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
        for number, at_s in enumerate(self._joins, workload.TRAINERS):
            self.scheduler.after(at_s, partial(self._start_trainer, number), keeps=True)
        for fault in self.schedule.faults.values():
            self._plan(fault)
        try:
            self.scheduler.run(limit_s=_LIMIT_S, cpu_s=_CPU_S)
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
        first = self.result.trainers[: workload.TRAINERS]
        self.result.lost_early |= not all(record.seen for record in first)
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
            end.values, end.data = _values(core), _data(core, self.scheduler.now_s)
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
            pace_s = self.schedule.pace_s[trainer % workload.TRAINERS]
            try:
                workload.train(
                    self.mode,
                    trainer,
                    lambda job: self._connect(process, trainer, life, job),
                    record,
                    pause=lambda _: self.scheduler.sleep(pace_s),
                    folder=self.root / "shared",
                    scaling=self._place(process, trainer) if self.mode.changes else None,
                    leaves_after=self._leaves.get(trainer),
                )
            except Departure:
                self.note(f"{self.scheduler.now_s:.6f} {process.name} has left")
            except Exception as error:  # noqa: BLE001  # the invariants judge it
                self.result.errors[trainer] = error

        self.scheduler.start(process, process.name, body)

    def _place(self, process: Process, trainer: int) -> Place:
        def connect(job: JobPrograms, members: Membership, session: str) -> Client:
            number = members.number_of(session)
            assert number is not None
            me = self._identity(job, number, len(members.sessions))
            return self._client(process, replace(me, membership=members, session=session))

        network = self.network.of(process)
        return Place(
            self.mode,
            joins=trainer >= workload.TRAINERS,
            connect_as=connect,
            lines=lambda: network.connect(self.endpoints),
            clock=self.scheduler.clock,
        )

    def _connect(self, process: Process, trainer: int, life: int, job: JobPrograms) -> Client:
        return self._client(process, self._identity(job, trainer, workload.TRAINERS, life))

    def _identity(
        self, job: JobPrograms, trainer: int, trainers: int, life: int = 0
    ) -> TrainerIdentity:
        return membership(
            job,
            name=workload.NAME,
            trainer=trainer,
            trainers=trainers,
            endpoints=self.endpoints,
            life=life,
        )

    def _client(self, process: Process, me: TrainerIdentity) -> Client:
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
        self.scheduler.start(process, f"heartbeat {process.name}", beats.run)
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


def _data(core: ServerCore, now_s: float) -> dict[str, int]:
    """Returns the counts of the one epoch of leased samples; empty if there are none."""
    data = core.figures(now_s).counted.get("data")
    epochs = data.get("epochs") if isinstance(data, dict) else None
    found = epochs[0] if isinstance(epochs, list) and epochs else None
    return {name: int(str(n)) for name, n in found.items()} if isinstance(found, dict) else {}

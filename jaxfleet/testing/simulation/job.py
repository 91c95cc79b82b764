"""Runs one schedule: the processes of a job, and the faults that happen to them."""

import gc
import hashlib
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from jaxfleet.env import MOVING
from jaxfleet.ps.server import ServerOptions
from jaxfleet.runtime.trainer_membership import Departure
from jaxfleet.testing.simulation import workload
from jaxfleet.testing.simulation.disk import Disk
from jaxfleet.testing.simulation.faults import (
    ClockJump,
    FullDisk,
    Join,
    KillServer,
    KillTrainer,
    Leave,
    Move,
    Reset,
    Stop,
    Weather,
)
from jaxfleet.testing.simulation.launch import Launch, LaunchedServers
from jaxfleet.testing.simulation.network import SimulatedNetwork
from jaxfleet.testing.simulation.run import Run, ServerEnd
from jaxfleet.testing.simulation.schedule import RETURNS_S, Schedule
from jaxfleet.testing.simulation.scheduler import KilledError, Process, Scheduler, StuckError
from jaxfleet.testing.simulation.server_process import KILLED, ServerProcess
from jaxfleet.testing.simulation.substitutes import substituted
from jaxfleet.testing.simulation.trainer_process import TrainerProcess

_LIMIT_S, _CPU_S = 400.0, 60.0
_RESTARTS = 3  # of a server that no trainer has greeted, as by a launch
_ROOT = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  # fsync costs nothing there


def run_schedule(schedule: Schedule, trace: Callable[[str], None] | None = None) -> Run:
    """Runs a schedule to its end."""
    root = Path(tempfile.mkdtemp(prefix="jaxfleet-simulation-", dir=_ROOT))
    job = Job(schedule, root, trace)
    try:
        machine = substituted(job.scheduler.clock, job.draw("machine"), job.disk_of)
        with _uncollected(), machine, job.launch.substituted():
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
        self.scheduler = Scheduler()
        numbers = range(self.mode.most_servers)
        self._joins = sorted(x.at_s for x in schedule.faults.values() if isinstance(x, Join))
        self._leaves = {
            x.trainer: x.after_step for x in schedule.faults.values() if isinstance(x, Leave)
        }
        self.result = Run(
            schedule,
            [workload.Record() for _ in range(workload.TRAINERS + len(self._joins))],
            [ServerEnd() for _ in numbers],
        )
        self._trace, self._digest = trace, hashlib.blake2b(digest_size=16)
        weather = Weather(schedule.seed, schedule.faults)
        self.network = SimulatedNetwork(self.scheduler, weather, self.note, self._before_message)
        self.members = LaunchedServers(
            list(workload.endpoints_of(self.mode)), root, self._start_server, self._forget_disk
        )
        self.launch = Launch(self.members, self.network, self.scheduler, self.note)
        self.processes: dict[str, Process] = {}
        self.disks = [
            Disk(
                f"server {n}",
                root / f"server{n}",
                root / "shared",
                root / MOVING,
                self.draw(f"disk {n}"),
                partial(self._crash, n),
            )
            for n in numbers
        ]
        self._kills: dict[int, list[KillServer]] = {n: [] for n in numbers}
        self._dying: dict[int, KillServer] = {}
        self._sent: Counter[str] = Counter()  # messages by process
        self._lives: Counter[int] = Counter()  # starts of trainers
        self._training = 0  # trainers that run

    def draw(self, what: str) -> random.Random:
        """Returns a generator for one purpose, so that no other changes what it draws."""
        return random.Random(f"{self.schedule.seed}/{what}")  # noqa: S311  # not for secrets

    def note(self, line: str) -> None:
        """Adds a line to the trace, without the name of the run's folder."""
        line = line.replace(str(self.root), "")
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
        for number in range(len(self.members.endpoints)):
            self._start_server(number)
        for number in range(workload.TRAINERS):
            self._start_trainer(number)
        for number, at_s in enumerate(self._joins, workload.TRAINERS):
            self.scheduler.after(at_s, partial(self._start_trainer, number), keeps=True)
        for fault in self.schedule.faults.values():
            self._plan(fault)
        moves = [x for x in self.schedule.faults.values() if isinstance(x, Move)]
        self.launch.move(sorted(moves, key=lambda move: move.at_s))
        try:
            self.scheduler.run(limit_s=_LIMIT_S, cpu_s=_CPU_S)
        except StuckError as error:
            self.result.stuck = str(error)
        self.result.former = [(one.number, one.end) for one in self.members.former]
        self.result.crashes = self.scheduler.crashes
        self.result.took_s = self.scheduler.now_s
        self.result.digest = self._digest.hexdigest()

    # --- faults -----------------------------------------------------------------------------------

    def _plan(self, fault: object) -> None:
        after = self.scheduler.after
        match fault:
            case Reset():
                after(fault.at_s, lambda: self._reset(fault))
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

    def _reset(self, fault: Reset) -> None:
        if fault.server < len(self.members.endpoints):
            endpoint = self.members.endpoints[fault.server]
            self.network.reset(f"trainer {fault.trainer}", endpoint)

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
        if self.scheduler.current().process.is_alive:
            return  # it is another one, which the launch has forgotten
        raise KilledError

    def _kill_server(self, kill: KillServer) -> None:
        server = self.members.servers.get(kill.server)
        if server is None or not server.process.is_alive or not server.end.is_up:
            return
        process, server.status = server.process, KILLED
        self.note(f"{self.scheduler.now_s:.6f} {process.name} is killed")
        tree = self.disks[kill.server].tree(loses_power=kill.loses_power)
        self.scheduler.kill(process)
        self.network.lose(process)
        server.end.is_up = False
        if not self.launch.has_ended(server):
            return

        def come_back() -> None:
            if not self.launch.is_awaited(server):
                return
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
        if (process := self.processes.get(name)) is None:
            return
        process.stopped_until = max(process.stopped_until, self.scheduler.now_s + seconds)
        self.result.waits.excused_s += seconds

    def _jump(self, name: str, seconds: float) -> None:
        if (process := self.processes.get(name)) is None:
            return
        process.ahead_s += seconds
        self.result.waits.excused_s += seconds

    # --- processes --------------------------------------------------------------------------------

    def _forget_disk(self, server: int) -> None:
        self.disks[server].put_back({})

    def _start_server(self, server: int) -> None:
        process = self.processes[f"server {server}"] = Process(f"server {server}")
        end, before = self.result.servers[server], self.members.servers.get(server)
        if before is None and end.starts:  # of an earlier server of this number
            end = self.result.servers[server] = ServerEnd()
        end.starts += 1
        end.is_up, end.error = True, None
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
        served = self.members.servers[server] = ServerProcess(
            process,
            server,
            self.members.endpoints[server],
            len(self.members.endpoints),
            end,
            options,
            self.scheduler,
            self.network.of(process),
            self.draw,
            self.result.sizes.look_at_server,
        )

        def body() -> None:
            served.serve()
            if process.is_alive and self.launch.has_ended(served):
                is_early = served.status != 0 and not end.has_served  # no trainer came in time
                if is_early and self._training and end.starts <= _RESTARTS:
                    self._start_server(server)

        self.scheduler.start(process, process.name, body)

    def _start_trainer(self, trainer: int) -> None:
        process = self.processes[f"trainer {trainer}"] = Process(f"trainer {trainer}")
        record = self.result.trainers[trainer] = workload.Record()
        life, self._lives[trainer] = self._lives[trainer], self._lives[trainer] + 1
        self.result.errors.pop(trainer, None)
        self._training += 1
        one = TrainerProcess(
            process,
            trainer,
            life,
            self.schedule,
            tuple(self.members.endpoints),
            self.scheduler,
            self.network.of(process),
            self.result,
        )

        def body() -> None:
            try:
                one.train(record, self.root / "shared", self._leaves.get(trainer))
            except Departure:
                self.note(f"{self.scheduler.now_s:.6f} {process.name} has left")
            except Exception as error:  # noqa: BLE001  # the invariants judge it
                self.result.errors[trainer] = error
            finally:
                self._training -= 1
                if not self._training:
                    self.launch.close()

        self.scheduler.start(process, process.name, body)

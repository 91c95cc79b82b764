"""The processes of a job: which command each runs, in which environment."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from jaxfleet.env import Cluster, cluster_environment
from jaxfleet.launch.console import Console
from jaxfleet.launch.events import Ended, Events, Gone
from jaxfleet.launch.job import Job
from jaxfleet.launch.keeper import Keeper
from jaxfleet.launch.ports import Ports
from jaxfleet.launch.process import Process


class Members:
    """Starts a job's processes and holds those that were started.

    Args:
        job: what to run.
        ports: the servers'.
        keeper: ends them if this process is killed.
        console: where their lines are shown.
        events: gets their ends.
        folder: where servers keep checkpoints if the job names no folder.
    """

    def __init__(
        self,
        job: Job,
        *,
        ports: Ports,
        keeper: Keeper,
        console: Console,
        events: Events,
        folder: Path | None,
    ) -> None:
        self._job, self._ports, self._keeper = job, ports, keeper
        self._console, self._events = console, events
        self._checkpoints = (job.checkpoint_dir or folder or Path()).resolve()
        self._logs: dict[str, BinaryIO] = {}
        self._open = ExitStack()
        self.trainers: list[Process] = []
        self.servers: dict[int, Process] = {}  # those that run now, or ran last
        self.everybody: list[Process] = []

    def start(self) -> None:
        """Starts all, servers first."""
        for index in range(self._job.servers):
            self.start_server(index)
        for trainer in range(self._job.trainers):
            process = self._start(
                f"trainer {trainer}",
                self._job.trainer,
                self._cluster(trainer_id=trainer),
            )
            self.trainers.append(process)
            self._console.say(f"{process.name}: process {process.pid}")

    def start_server(self, index: int) -> None:
        """Starts a server, for the first time or again: each time in the same environment."""
        endpoint = self._ports.endpoints[index]
        self._ports.give(index)
        process = self._start(f"server {index}", self._job.server, self._cluster(endpoint=endpoint))
        self.servers[index] = process
        self._console.say(f"{process.name}: process {process.pid}, at {endpoint}")

    def _cluster(self, *, trainer_id: int | None = None, endpoint: str | None = None) -> Cluster:
        job, secret = self._job, self._job.secret_file
        return Cluster(
            role="pserver" if trainer_id is None else "trainer",
            trainers=job.trainers,
            endpoints=tuple(self._ports.endpoints),
            trainer_id=trainer_id,
            current_endpoint=endpoint,
            job=job.name,
            secret_file=None if secret is None else secret.resolve(),
            checkpoint_dir=self._checkpoints if trainer_id is None else None,
            server_return_s=job.server_return_s if job.restarts else 0.0,
        )

    def _start(self, name: str, command: tuple[str, ...], cluster: Cluster) -> Process:
        process = Process(
            name=name,
            command=command,
            environment=cluster_environment(cluster) | _settings(self._job),
            console=self._console,
            log=self._logs.get(name),
            keeper=self._keeper,
            grace_s=self._job.grace_s,
            on_end=lambda process: self._events.put(Ended(process)),
            on_gone=lambda process: self._events.put(Gone(process)),
        )
        self.everybody.append(process)
        return process

    def __enter__(self) -> Self:
        """Makes the folders and opens the log files."""
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        folder = self._job.log_dir
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for role, count in (("server", self._job.servers), ("trainer", self._job.trainers)):
                for at in range(count):
                    opened = (folder / f"{role}-{at}.log").open("wb", buffering=0)
                    self._logs[f"{role} {at}"] = self._open.enter_context(opened)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()


def _settings(job: Job) -> dict[str, str]:
    """Returns what the environment says besides a role."""
    settings = {"PYTHONUNBUFFERED": "1"}  # lines are shown when they are written
    if job.threads is not None:
        # XLA's pool on the CPU, and numpy's.
        names = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        settings |= dict.fromkeys(names, str(job.threads))
    return settings

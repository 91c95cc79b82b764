"""The servers and trainers of a job: which command each runs, in which environment."""

from pathlib import Path

from jaxfleet.env import Cluster, cluster_environment, read_job
from jaxfleet.launch.job import Job
from jaxfleet.launch.places import Places
from jaxfleet.launch.process import Process
from jaxfleet.launch.starter import Starter


class Members:
    """Starts the servers and trainers that a job has on this machine.

    Args:
        job: what to run.
        places: where servers listen.
        starter: starts processes.
        folder: where servers keep checkpoints.
        meeting: where role makers let all meet, None where not all see one folder.
    """

    def __init__(
        self, job: Job, *, places: Places, starter: Starter, folder: Path, meeting: Path | None
    ) -> None:
        self._meeting = meeting
        self._job, self._places, self._starter = job, places, starter
        self._checkpoints = folder.resolve()
        save_dirs = job.save_dirs or read_job().save_dirs or (Path.cwd(),)
        self._save_dirs = tuple(one.resolve() for one in save_dirs)
        self.trainers: list[Process] = []
        self.servers: dict[int, Process] = {}  # those that run now, or ran last
        self._starts: dict[int, int] = {}

    def start(self) -> None:
        """Starts all, servers first."""
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        for index in self._places.servers:
            self.start_server(index)
        for trainer in self._places.trainers:
            cluster = self._cluster(trainer_id=trainer)
            process = self._start(f"trainer {trainer}", self._job.trainer, cluster)
            self.trainers.append(process)
            self._starter.console.say(f"{process.name}: process {process.pid}")

    def start_server(self, index: int) -> None:
        """Starts a server, for the first time or again: each time in the same environment."""
        endpoint = self._places.endpoints[index]
        self._places.give(index)
        process = self._start(f"server {index}", self._job.server, self._cluster(endpoint=endpoint))
        self.servers[index] = process
        count = self._starts[index] = self._starts.get(index, 0) + 1
        again = f", start {count}" if count > 1 else ""
        self._starter.console.say(f"{process.name}: process {process.pid}, at {endpoint}{again}")

    def _cluster(self, *, trainer_id: int | None = None, endpoint: str | None = None) -> Cluster:
        job = self._job
        return Cluster(
            role="pserver" if trainer_id is None else "trainer",
            trainers=job.trainers,
            endpoints=self._places.endpoints,
            trainer_id=trainer_id,
            current_endpoint=endpoint,
            job=job.name,
            secret_file=job.secret,
            checkpoint_dir=self._checkpoints if trainer_id is None else None,
            server_return_s=job.server_return_s if job.restarts else 0.0,
            meeting_dir=self._meeting,
            insecure=job.insecure,
            save_dirs=self._save_dirs if trainer_id is None else (),
        )

    def _start(self, name: str, command: tuple[str, ...], cluster: Cluster) -> Process:
        return self._starter.start(name, command, cluster_environment(cluster))

"""The servers and trainers of a job on this machine: their environments, starts and restarts."""

import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxfleet.env import (
    MOVING,
    PeriodicSaves,
    PserverRole,
    cluster_environment,
    compiled_code_environment,
    ended_file,
    periodic_saves_environment,
    read_job,
)
from jaxfleet.launch.job_spec import SERVE, Job
from jaxfleet.launch.placement import Places, Ports
from jaxfleet.launch.process import Process
from jaxfleet.launch.spares import Spares
from jaxfleet.launch.starter import Starter, log_name


@dataclass(frozen=True)
class Folders:
    """Folders of a job on this machine.

    Attributes:
        checkpoints: of the servers' own checkpoints.
        meeting: where role makers rendezvous, if anywhere.
        compiled: of compiled code, which a restarted process loads; None if none is restarted.
        saves: the job's periodic checkpoints, if any.
    """

    checkpoints: Path
    meeting: Path | None
    compiled: Path | None = None
    saves: PeriodicSaves | None = None


class Members:
    """Starts this machine's servers and trainers of a job.

    Attributes:
        trainers: the current or last process of each, by number.
        servers: likewise.
        start_number: how often the whole job was started before.
        planned: the numbers of the trainers of a start.
        planned_servers: the number of servers of a start.
        moving_folder: through which the state goes when the servers change.
        joined: those of trainers that were started to join the job since.
        former: processes of this start that have left or died, while the job goes on.
    """

    def __init__(
        self,
        job: Job,
        *,
        places: Places,
        starter: Starter,
        folders: Folders,
        logs: Callable[[str, int], str] = log_name,
    ) -> None:
        self._job, self._places, self._starter, self._folders = job, places, starter, folders
        self._logs = logs
        self.moving_folder = folders.checkpoints / job.name / MOVING
        save_dirs = job.save_dirs or read_job().save_dirs or (Path.cwd(),)
        saves = folders.saves
        own = () if saves is None else (saves.folder,)
        self._save_dirs = tuple(one.resolve() for one in (*save_dirs, *own))
        self.trainers: dict[int, Process] = {}
        self.servers: dict[int, Process] = {}
        self.start_number = 0
        self.planned: Sequence[int] = places.trainers
        self.planned_servers = len(places.endpoints)
        self.joined: set[int] = set()
        self.former: list[Process] = []
        self._count = job.trainers  # of this start
        self._next = 0  # number of the next trainer that is added
        self._starts: dict[str, int] = {}  # of this start of the job, by process
        self._launch_id = ""
        has_spares = job.server == SERVE and job.restarts > 0 and len(places.servers) > 0
        self.spares = Spares(
            starter,
            (*SERVE, "--standby"),
            self._server_environment(places.servers[0]) if has_spares else {},
            count=job.spares if has_spares else 0,
        )

    @property
    def have_served(self) -> bool:
        """Whether all servers have ended well, so that no process can join the job any more."""
        servers = self.servers.values()
        return bool(servers) and all(server.status == 0 for server in servers)

    def tell_joiners(self) -> None:
        """Lets processes that still wait to join a job that is done end."""
        if (file := self._ended_file) is not None:
            file.touch()

    @property
    def _ended_file(self) -> Path | None:
        """Reports the end of the job to joiners, which only a job on one machine has."""
        meeting = self._folders.meeting
        return None if meeting is None or self._job.nodes.several else ended_file(meeting)

    def start(self, number: int) -> None:
        """Starts all processes; `number` counts the starts of the whole job from 0."""
        if (file := self._ended_file) is not None:
            file.unlink(missing_ok=True)
        self.start_number, self._launch_id = number, secrets.token_hex(8)
        self.trainers, self.servers, self._starts = {}, {}, {}
        self.joined, self.former = set(), []
        if not self._job.nodes.several:
            self._count = self._next = len(self.planned)
        self._folders.checkpoints.mkdir(parents=True, exist_ok=True)
        self.end_move()
        if number:
            self._forget_servers()
        if not self._job.nodes.several:
            self.drop_places(self.planned_servers)
        for index in self._places.servers:
            self.start_server(index)
        for index in self.planned:
            self.start_trainer(index)
        self.spares.start_later()

    @property
    def endpoints(self) -> Sequence[str]:
        """Where the job's servers listen, those included that are to leave or were just added."""
        return self._places.endpoints

    def add_servers(self, ports: Ports) -> range:
        """Starts more servers, to which the job may move; returns their numbers."""
        added = self._places.add(ports)
        for index in added:
            shutil.rmtree(self._own_checkpoints / f"server{index}", ignore_errors=True)
            self._starter.name_log(f"server {index}", self._logs("server", index))
            self.start_server(index)
        return added

    def forget_server(self, index: int) -> Process:
        """Removes a server that the job does without; returns it."""
        process = self.servers.pop(index)
        self.former.append(process)
        return process

    def drop_places(self, count: int) -> None:
        """Keeps the places of so many servers; the others have none any more."""
        if count < len(self._places.endpoints):
            self._places.cut(count)

    def end_move(self) -> None:
        """Removes the state that went to other servers."""
        shutil.rmtree(self.moving_folder, ignore_errors=True)

    def start_server(self, index: int) -> None:
        """Starts or restarts a server, with the endpoints that the job has or is to have."""
        endpoint = self._places.endpoints[index]
        self._places.give(index)
        name, environment = f"server {index}", self._server_environment(index)
        process = self.spares.take(name, environment)
        if process is None:
            process = self._starter.start(name, self._job.server, environment)
        else:
            self.spares.start_later()
        self.servers[index] = process
        self._say(process, f", at {endpoint}")

    def start_trainer(self, index: int) -> None:
        """Starts or restarts a trainer, whose lives `JAXFLEET_RESTART` tells apart.

        In a job that goes on without it, a restarted trainer joins as one more.
        """
        lives = self._starts.get(f"trainer {index}", 0)
        joins = index in self.joined or (lives > 0 and self.joins_again(index))
        if joins:
            self.joined.add(index)
        cluster = self._cluster(trainer_id=index, restart=self.start_number + lives, joins=joins)
        environment = {
            **cluster_environment(cluster),
            **periodic_saves_environment(self._folders.saves),
        }
        if self._job.trainer_restarts or self._job.max_restarts:
            environment = self._keeping_code(environment)
        process = self._starter.start(f"trainer {index}", self._job.trainer, environment)
        self.trainers[index] = process
        self._say(process)

    def add_trainer(self) -> Process:
        """Starts one more trainer, which joins the job."""
        index, self._next = self._next, self._next + 1
        self.joined.add(index)
        self._starter.name_log(f"trainer {index}", self._logs("trainer", index))
        self.start_trainer(index)
        return self.trainers[index]

    def forget(self, index: int) -> Process:
        """Removes a trainer that has ended, and without which the job goes on; returns it."""
        process = self.trainers.pop(index)
        self.former.append(process)
        return process

    def joins_again(self, index: int) -> bool:
        """Whether a trainer that is started again joins, since the others went on without it."""
        return self._job.min_trainers is not None or index in self.joined

    def find(self, process: Process) -> tuple[str, int] | None:
        """Returns the role and number of a current process; None for any other."""
        for role, members in (("trainer", self.trainers), ("server", self.servers)):
            for index, member in members.items():
                if member is process:
                    return role, index
        return None

    def _say(self, process: Process, where: str = "") -> None:
        count = self._starts[process.name] = self._starts.get(process.name, 0) + 1
        again = f", start {count}" if count > 1 else ""
        self._starter.console.say(f"{process.name}: process {process.pid}{where}{again}")

    def _forget_servers(self) -> None:
        """Removes the servers' own checkpoints: the whole job goes back to one of its own."""
        for index in self._places.servers:
            shutil.rmtree(self._own_checkpoints / f"server{index}", ignore_errors=True)

    @property
    def _own_checkpoints(self) -> Path:
        own = self._cluster(endpoint=self._places.endpoints[0]).own_checkpoints
        assert own is not None
        return own

    def _server_environment(self, index: int) -> Mapping[str, str]:
        endpoint, restart = self._places.endpoints[index], self.start_number
        return self._keeping_code(
            cluster_environment(self._cluster(endpoint=endpoint, restart=restart))
        )

    def _keeping_code(self, environment: dict[str, str]) -> dict[str, str]:
        compiled = self._folders.compiled
        return environment if compiled is None else compiled_code_environment(environment, compiled)

    def _cluster(
        self,
        *,
        trainer_id: int | None = None,
        endpoint: str | None = None,
        restart: int = 0,
        joins: bool = False,
    ) -> PserverRole:
        job, folders = self._job, self._folders
        meeting = folders.meeting
        if meeting is not None and self.start_number:
            meeting /= f"start-{self.start_number}"  # without files of the last one
        return PserverRole(
            role="pserver" if trainer_id is None else "trainer",
            trainers=self._count,
            endpoints=self._places.endpoints,
            trainer_id=trainer_id,
            current_endpoint=endpoint,
            job=job.name,
            secret_file=job.secret,
            checkpoint_dir=folders.checkpoints if trainer_id is None else None,
            server_return_s=job.server_return_s if job.restarts else 0.0,
            meeting_dir=meeting,
            insecure=job.insecure,
            save_dirs=self._save_dirs if trainer_id is None else (),
            launch_id=self._launch_id if trainer_id is None else None,
            restart=restart,
            joins=joins,
        )

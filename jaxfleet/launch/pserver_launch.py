"""Launch of a job of servers and trainers; the first failure stops it."""

import secrets
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from jaxfleet.env import PserverRole, cluster_environment, read_job
from jaxfleet.launch.job_spec import PORT_TAKEN, Job
from jaxfleet.launch.placement import Places
from jaxfleet.launch.process import Process
from jaxfleet.launch.starter import (
    Due,
    Ended,
    Event,
    Starter,
    Told,
    log_name,
    meeting_folder,
    starting,
    temporary_folder,
    with_secret,
)
from jaxfleet.launch.termination import Deadline, Ender, Outcome, failure, told
from jaxfleet.observability import LongWait


class Members:
    """Starts this machine's servers and trainers of a job."""

    def __init__(
        self, job: Job, *, places: Places, starter: Starter, folder: Path, meeting: Path | None
    ) -> None:
        self._meeting = meeting
        self._job, self._places, self._starter = job, places, starter
        self._checkpoints = folder.resolve()
        save_dirs = job.save_dirs or read_job().save_dirs or (Path.cwd(),)
        self._save_dirs = tuple(one.resolve() for one in save_dirs)
        self.trainers: list[Process] = []
        self.servers: dict[int, Process] = {}  # the current or last process of each
        self._starts: dict[int, int] = {}
        self._launch_id = secrets.token_hex(8)

    def start(self) -> None:
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        for index in self._places.servers:
            self.start_server(index)
        for trainer in self._places.trainers:
            cluster = self._cluster(trainer_id=trainer)
            process = self._start(f"trainer {trainer}", self._job.trainer, cluster)
            self.trainers.append(process)
            self._starter.console.say(f"{process.name}: process {process.pid}")

    def start_server(self, index: int) -> None:
        """Starts or restarts a server, always with the same environment."""
        endpoint = self._places.endpoints[index]
        self._places.give(index)
        process = self._start(f"server {index}", self._job.server, self._cluster(endpoint=endpoint))
        self.servers[index] = process
        count = self._starts[index] = self._starts.get(index, 0) + 1
        again = f", start {count}" if count > 1 else ""
        self._starter.console.say(f"{process.name}: process {process.pid}, at {endpoint}{again}")

    def _cluster(
        self, *, trainer_id: int | None = None, endpoint: str | None = None
    ) -> PserverRole:
        job = self._job
        return PserverRole(
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
            launch_id=self._launch_id if trainer_id is None else None,
        )

    def _start(self, name: str, command: tuple[str, ...], cluster: PserverRole) -> Process:
        return self._starter.start(name, command, cluster_environment(cluster))


_AGAIN_S = 0.5  # delay before a dead server is started again
_MOST_PORT_TAKEN = 20


def launch(job: Job, *, logs: Callable[[str, int], str] = log_name) -> int:
    """Runs this machine's part of a job, shows its output, and returns an exit status.

    The status is 0 when all trainers ended with 0 and no server failed for good; that of the first
    process that failed (128 + n if signal n killed it); 128 + n when this process received signal
    n; 124 on a timeout. However the launch ends, even if it is killed, none of the processes is
    left.
    """
    with ExitStack() as stack:
        folder = job.checkpoint_dir or temporary_folder(stack)
        places = Places(job)
        stack.callback(places.close)
        names = {f"server {at}": logs("server", at) for at in places.servers}
        names |= {f"trainer {at}": logs("trainer", at) for at in places.trainers}
        temporary = [] if job.checkpoint_dir else [folder]
        meeting, removed = meeting_folder(job, stack)
        job, secret = with_secret(job, stack)
        folders = [*secret, *temporary, *removed]
        starter = stack.enter_context(starting(job, names, folders=folders))
        members = Members(job, places=places, starter=starter, folder=folder, meeting=meeting)
        return _Launch(job, starter, members).run()


class _Launch:
    """A job from its start to its end."""

    def __init__(self, job: Job, starter: Starter, members: Members) -> None:
        self._job, self._starter, self._members = job, starter, members
        self._console, self._events = starter.console, starter.events
        self._deaths = dict.fromkeys(range(job.servers), 0)
        self._taken = dict.fromkeys(range(job.servers), 0)
        self._waiting: set[int] = set()  # dead servers that are about to be started again

    def run(self) -> int:
        members, outcome = self._members, Outcome(1, "the launch itself failed")
        ender = Ender(self._job, self._starter)
        try:
            members.start()
            if not self._starter.everybody:
                self._console.say("this machine has none of the job's processes")
            outcome = self._watch()
        finally:
            if outcome.why:
                self._console.complain(f"{outcome.why}; stopping all")
            ender.stop(members.trainers, outcome.number)
            ender.stop(members.servers.values(), signal.SIGTERM)
            ender.report(self._starter.everybody, outcome.failed)
        return outcome.status

    def _watch(self) -> Outcome:
        deadline = Deadline(self._job)
        while not all(trainer.status == 0 for trainer in self._members.trainers):
            event = self._events.next(deadline.at)
            if (outcome := self._act(event, deadline)) is not None:
                return outcome
        if self._job.trainers_done:
            self._console.say(self._job.trainers_done)
        if self._job.nodes.several:
            return self._serve_others(deadline)
        return self._see_servers_off(deadline.or_in(self._job.grace_s))

    def _serve_others(self, deadline: Deadline) -> Outcome:
        """Waits for servers, which end when the trainers of all machines have said bye."""
        wait = LongWait(say=self._console.say)
        while not all(server.status == 0 for server in self._members.servers.values()):
            event = self._events.awaited(deadline.at, wait, self._servers_wait)
            if (outcome := self._act(event, deadline)) is not None:
                return outcome
        return Outcome(0)

    def _see_servers_off(self, deadline: Deadline) -> Outcome:
        """Waits for servers that have no trainers left."""
        wait = LongWait(say=self._console.say)
        while any(server.status is None for server in self._members.servers.values()):
            event = self._events.awaited(deadline.at, wait, self._servers_wait)
            if event is None:
                self._say_who_waits()
                break
            if isinstance(event, Told):
                return told(event)
        for index, server in self._members.servers.items():
            if server.status and index not in self._waiting:
                return failure(server)
        return Outcome(0)

    def _say_who_waits(self) -> None:
        """Names servers whose trainers ended without bye: the script may have omitted its mode."""
        waiting = [s.name for s in self._members.servers.values() if s.status is None]
        what = f"all trainers ended well, and {', '.join(waiting)} heard no bye of them"
        hint = "a step that uses servers is jf.distribute(..., strategy='pserver')"
        self._console.say(f"{what}; {hint}")

    def _servers_wait(self) -> str:
        """Names servers that still run although this machine's trainers have ended."""
        left = [s.name for s in self._members.servers.values() if s.status is None]
        return f"{', '.join(left)} waits for the byes of trainers"

    def _act(self, event: Event | None, deadline: Deadline) -> Outcome | None:
        """Handles an event; returns the outcome if it ended the job."""
        match event:
            case None:
                return deadline.missed
            case Told() as event:
                return told(event)
            case Due(index):
                self._waiting.discard(index)
                self._members.start_server(index)
            case Ended(process) if process.status:
                if process in self._members.trainers:
                    return failure(process)
                return self._server_died(process)
        return None

    def _server_died(self, server: Process) -> Outcome | None:
        """Schedules a restart of a server, unless it died too often."""
        (index,) = (at for at, each in self._members.servers.items() if each is server)
        counts, most = self._deaths, self._job.restarts
        if server.status == PORT_TAKEN:
            counts, most = self._taken, _MOST_PORT_TAKEN
        if counts[index] >= most:
            return failure(server)
        counts[index] += 1
        self._console.say(
            f"{server.name} {server.ending} after {server.seconds:.1f} s; "
            f"it is started again ({counts[index]} of {most})"
        )
        self._waiting.add(index)
        self._events.put_later(Due(index), _AGAIN_S)
        return None

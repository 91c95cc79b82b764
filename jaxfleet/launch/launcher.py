"""Runs a job on this machine: starts servers and trainers, and stops all at the first failure."""

import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from jaxfleet.launch.console import Console
from jaxfleet.launch.events import Due, Ended, Events, Told
from jaxfleet.launch.job import PORT_TAKEN, Job
from jaxfleet.launch.keeper import Keeper
from jaxfleet.launch.members import Members
from jaxfleet.launch.ports import Ports
from jaxfleet.launch.process import Process

_FOREVER = 10 * 365 * 86400.0
_AGAIN_S = 0.5  # until a server that died is started again
_MOST_PORT_TAKEN = 20
_KILL_S = 10.0
_TIMED_OUT = 124  # as coreutils' timeout says it


@dataclass(frozen=True)
class _Outcome:
    """Says how a job went.

    Attributes:
        status: this launch's exit status.
        why: what ended it, where it did not end by itself.
        failed: the process that did.
        number: what trainers are sent to stop them.
    """

    status: int
    why: str = ""
    failed: Process | None = None
    number: signal.Signals = signal.SIGTERM


def launch(job: Job) -> int:
    """Runs a job's servers and trainers, shows what they write, and returns an exit status.

    The status is 0 when all trainers ended with 0 and no server failed for good; that of the first
    process that failed (128 + n where signal n killed it); 128 + n when this process was sent
    signal n; 124 when the job took longer than it may. Whatever the end, also if this process is
    killed, none of the processes is left.

    Raises:
        StrategyError: a port that was asked for is taken.
        OSError: a folder for logs cannot be made.
    """
    with ExitStack() as stack:
        events = Events()
        stack.enter_context(events.signals())
        folder = _temporary_folder(stack) if job.checkpoint_dir is None else None
        ports = Ports(job.servers, first=job.port)
        stack.callback(ports.close)
        keeper = stack.enter_context(Keeper(job.grace_s, folder))
        names = [*(f"server {at}" for at in range(job.servers))]
        names += [f"trainer {at}" for at in range(job.trainers)]
        console = Console(names, lambda: events.put(Told(signal.SIGPIPE)))
        members = stack.enter_context(
            Members(job, ports=ports, keeper=keeper, console=console, events=events, folder=folder)
        )
        return _Launch(job, console, events, members).run()


def _temporary_folder(stack: ExitStack) -> Path:
    return Path(
        stack.enter_context(
            tempfile.TemporaryDirectory(prefix="jaxfleet-", ignore_cleanup_errors=True)
        )
    )


class _Launch:
    """Follows a job from its start to its end."""

    def __init__(self, job: Job, console: Console, events: Events, members: Members) -> None:
        self._job, self._console, self._events, self._members = job, console, events, members
        self._deaths = [0] * job.servers
        self._taken = [0] * job.servers
        self._waiting: set[int] = set()  # servers that died and are about to be started again
        self._hurry = False

    def run(self) -> int:
        """Returns the exit status."""
        members, outcome = self._members, _Outcome(1, "the launch itself failed")
        try:
            members.start()
            outcome = self._watch()
        finally:
            if outcome.why:
                self._console.say(f"{outcome.why}; stopping all")
            self._stop(members.trainers, outcome.number)
            self._stop(members.servers.values(), signal.SIGTERM)
            self._report(outcome)
        return outcome.status

    def _watch(self) -> _Outcome:
        """Waits until the job is over, or has to be stopped."""
        limit_s = self._job.timeout_s
        deadline = time.monotonic() + (_FOREVER if limit_s is None else limit_s)
        while not all(trainer.status == 0 for trainer in self._members.trainers):
            if (outcome := self._next(deadline)) is not None:
                return outcome
        deadline = min(deadline, time.monotonic() + self._job.grace_s)
        while any(server.status is None for server in self._members.servers.values()):
            event = self._events.next(deadline)
            if event is None:
                self._say_who_waits()
                break
            if isinstance(event, Told):
                return self._told(event)
        for index, server in self._members.servers.items():
            if server.status and index not in self._waiting:
                return _failure(server)
        return _Outcome(0)

    def _say_who_waits(self) -> None:
        """Names servers that trainers ended without: a script may have left its mode out."""
        waiting = [s.name for s in self._members.servers.values() if s.status is None]
        what = f"all trainers ended well, and {', '.join(waiting)} heard no bye of them"
        hint = "a step that uses servers is jf.distribute(..., strategy='pserver')"
        self._console.say(f"{what}; {hint}")

    def _next(self, deadline: float) -> _Outcome | None:
        """Acts on one event; returns what it ended, if it ended the job."""
        match self._events.next(deadline):
            case None:
                limit_s = self._job.timeout_s
                return _Outcome(_TIMED_OUT, f"the job was not done after {limit_s:g} s")
            case Told() as told:
                return self._told(told)
            case Due(index):
                self._waiting.discard(index)
                self._members.start_server(index)
            case Ended(process) if process.status:
                if process in self._members.trainers:
                    return _failure(process)
                return self._server_died(process)
        return None

    def _told(self, told: Told) -> _Outcome:
        number = told.number
        if number is signal.SIGPIPE:
            return _Outcome(128 + number, "nobody reads the output any more")
        sent = signal.SIGINT if number is signal.SIGINT else signal.SIGTERM
        return _Outcome(128 + number, f"got {number.name}", number=sent)

    def _server_died(self, server: Process) -> _Outcome | None:
        """Has a server started again, unless it died too often."""
        (index,) = (at for at, each in self._members.servers.items() if each is server)
        counts, most = self._deaths, self._job.restarts
        if server.status == PORT_TAKEN:
            counts, most = self._taken, _MOST_PORT_TAKEN
        if counts[index] >= most:
            return _failure(server)
        counts[index] += 1
        self._console.say(
            f"{server.name} {server.ending} after {server.seconds:.1f} s; "
            f"it is started again ({counts[index]} of {most})"
        )
        self._waiting.add(index)
        self._events.put_later(Due(index), _AGAIN_S)
        return None

    def _stop(self, processes: Iterable[Process], number: signal.Signals) -> None:
        """Ends processes, with a grace unless somebody asks twice."""
        running = list(processes)
        for process in running:
            process.tell(number)
        self._wait(running, self._job.grace_s, patient=True)
        for process in running:
            if not process.gone:
                process.tell(signal.SIGKILL)
        self._wait(running, _KILL_S, patient=False)

    def _wait(self, processes: Sequence[Process], seconds: float, *, patient: bool) -> None:
        """Waits until processes are gone with all that they started and wrote."""
        deadline = time.monotonic() + seconds
        while not all(process.gone for process in processes):
            if patient and self._hurry:
                return
            event = self._events.next(deadline)
            if event is None:
                return
            if isinstance(event, Told):
                self._hurry = True

    def _report(self, outcome: _Outcome) -> None:
        say = self._console.say
        for process in self._members.everybody:
            say(f"{process.name} {process.ending}, {process.seconds:.1f} s")
        failed = outcome.failed
        if failed is None:
            return
        if failed.last:
            say(f"the last lines of {failed.name}:")
            self._console.show(failed.name, failed.last, error=True)
        else:
            say(f"{failed.name} wrote nothing")
        say(f"{failed.name} {failed.ending}")


def _failure(process: Process) -> _Outcome:
    assert process.status is not None
    why = f"{process.name} {process.ending} after {process.seconds:.1f} s"
    return _Outcome(process.status, why, process)

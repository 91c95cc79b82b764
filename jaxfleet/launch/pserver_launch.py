"""Launch of a job of servers and trainers; a failure that no restart mends stops it."""

import signal
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from jaxfleet.errors import JaxfleetError, StrategyError
from jaxfleet.launch.control import ControlSocket
from jaxfleet.launch.job_spec import PORT_TAKEN, Job
from jaxfleet.launch.members import Folders, Members
from jaxfleet.launch.output import Console
from jaxfleet.launch.placement import Places
from jaxfleet.launch.process import Process
from jaxfleet.launch.requests import Requests
from jaxfleet.launch.restarts import RestartBudget
from jaxfleet.launch.scaling import TrainerScaling
from jaxfleet.launch.server_scaling import ServerScaling
from jaxfleet.launch.starter import (
    Asked,
    Due,
    Ended,
    Event,
    SparesDue,
    Starter,
    Told,
    log_name,
    meeting_folder,
    periodic_saves,
    starting,
    temporary_folder,
    with_secret,
)
from jaxfleet.launch.termination import Deadline, Ender, Outcome, failure, told
from jaxfleet.launch.whole_job import restarting
from jaxfleet.observability import LongWait

_MOST_PORT_TAKEN = 20


def launch(job: Job, *, logs: Callable[[str, int], str] = log_name) -> int:
    """Runs this machine's part of a job, shows its output, and returns an exit status.

    Dead servers are started again, and dead trainers if the job allows it; when that does not help,
    the whole job is, if allowed.

    The status is 0 when all trainers ended with 0, each in its last life, and no server failed for
    good; that of the first process that failed in the last start (128 + n if signal n killed it);
    128 + n when this process received signal n; 124 on a timeout. However the launch ends, even if
    it is killed, none of the processes is left.
    """
    with ExitStack() as stack:
        folder = job.checkpoint_dir or temporary_folder(stack)
        places = Places(job)
        stack.callback(places.close)
        names = {f"server {at}": logs("server", at) for at in places.servers}
        names |= {f"trainer {at}": logs("trainer", at) for at in places.trainers}
        restarts = job.restarts or job.trainer_restarts or job.max_restarts
        compiled = temporary_folder(stack) if restarts else None
        temporary = [each for each in (None if job.checkpoint_dir else folder, compiled) if each]
        meeting, removed = meeting_folder(job, stack)
        job, secret = with_secret(job, stack)
        saves, saved = periodic_saves(job, stack, folder)
        control = temporary_folder(stack)
        folders = [*secret, *temporary, *removed, *saved, control]
        starter = stack.enter_context(starting(job, names, folders=folders))
        kept = Folders(folder.resolve(), meeting, compiled, saves)
        members = Members(job, places=places, starter=starter, folders=kept, logs=logs)
        stack.callback(members.spares.close)
        whole = _Launch(job, starter, members, places.endpoints[0])
        _listen(control, job, whole.scale, starter.console, stack)
        return restarting(job, starter, whole)


def _listen(
    folder: Path,
    job: Job,
    scale: Callable[[int | None, int | None], str],
    console: Console,
    stack: ExitStack,
) -> None:
    """Opens the control socket; without it the job runs all the same."""
    try:
        stack.callback(ControlSocket(folder, job.name, scale).close)
    except OSError as error:
        console.say(f"jaxfleet scale cannot reach this launch: {error}")


class _Launch:
    """The servers and trainers of this machine, from start to start of the job."""

    def __init__(self, job: Job, starter: Starter, members: Members, endpoint: str) -> None:
        self._job, self._starter, self._members = job, starter, members
        self._console, self._events = starter.console, starter.events
        self._deadline = Deadline(job)
        self._before = 0  # the number of processes of earlier starts
        self._requests = Requests(job.name, self._events)
        self.servers = ServerScaling(job, members, starter, self._requests)
        self.scaling = TrainerScaling(
            job,
            members,
            starter,
            endpoint=endpoint,
            requests=self._requests,
            is_due=lambda number: ("trainer", number) in self._waiting,
        )
        self._forget_deaths()

    def _forget_deaths(self) -> None:
        job = self._job
        self._budgets = {
            "server": defaultdict[int, RestartBudget](lambda: RestartBudget(job.restarts)),
            "trainer": defaultdict[int, RestartBudget](
                lambda: RestartBudget(job.trainer_restarts, gives_up=True)
            ),
        }
        self._taken = defaultdict[int, RestartBudget](lambda: RestartBudget(_MOST_PORT_TAKEN))
        self._waiting: set[tuple[str, int]] = set()  # dead ones that are about to be started again

    def scale(self, trainers: int | None, servers: int | None) -> str:
        """Changes the numbers of trainers and of servers, as far as given; returns what is done.

        Raises:
            ConnectError: a server does not answer.
            StrategyError: the job cannot have such a number.
        """
        done = [] if trainers is None else [self.scaling.ask(trainers)]
        try:
            done += [] if servers is None else [self.servers.ask(servers)]
        except JaxfleetError as error:
            if not done:
                raise
            raise StrategyError(f"{done[0]}; but {error}", hint=error.hint) from error
        return "\n".join(done)

    def prepare(self, start: int) -> int:
        if start:
            self._forget_deaths()
        return start

    def describe_restart(self, count: str) -> str:
        return f"the whole job is started again ({count}), from what it has saved"

    def run(self, start: int) -> Outcome:
        self._before = len(self._starter.everybody)
        self._members.start(start)
        self.scaling.begin()
        self.servers.begin()
        if not self._starter.everybody:
            self._console.say("this machine has none of the job's processes")
        self._requests.is_open = True
        try:
            return self._watch()
        finally:
            self._requests.is_open = False

    def stop(self, ender: Ender, outcome: Outcome, *, is_last: bool) -> Sequence[Process]:
        members = self._members
        ender.stop([*members.former, *members.trainers.values()], outcome.number)
        ender.stop(members.servers.values(), signal.SIGTERM)
        if is_last:
            ender.stop(members.spares.processes, signal.SIGTERM)
        return self._starter.everybody[self._before :]

    def _watch(self) -> Outcome:
        deadline = self._deadline
        while not all(trainer.status == 0 for trainer in self._members.trainers.values()):
            event = self._events.next(deadline.at)
            if (outcome := self._act(event, deadline)) is not None:
                return outcome
            if self._requests.is_open and self._members.have_served:
                self._requests.is_open = False
                self._members.tell_joiners()
        self._requests.is_open = False
        self.servers.end_unused()
        if self._job.trainers_done:
            self._console.say(self._job.trainers_done)
        if self._job.nodes.several:
            return self._serve_others(deadline)
        return self._see_servers_off(deadline.or_in(self._job.grace_s))

    def _serve_others(self, deadline: Deadline) -> Outcome:
        """Waits for servers, which end when the trainers of all machines have left."""
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
            if server.status and ("server", index) not in self._waiting:
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
            case SparesDue():
                self._members.spares.start_missing()
            case Due(index, role, start) if start == self._members.start_number:
                self._waiting.discard((role, index))
                return self._start(role, index)
            case Asked() as event:
                self._requests.answer(event)
            case Ended(process) if self._members.spares.has_ended(process):
                pass
            case Ended(process) if found := self._members.find(process):  # not of an earlier start
                role, index = found
                has_left = (self.scaling if role == "trainer" else self.servers).has_left(index)
                if process.status and not has_left:
                    return self._died(process, role, index)
        return None

    def _start(self, role: str, index: int) -> Outcome | None:
        """Starts a process again unless that is of no use; its last lines are read by now."""
        if role == "server":
            if not self.servers.has_left(index):
                self._members.start_server(index)
            return None
        if self.scaling.has_left(index):
            return None
        former = self._members.trainers[index]
        if former.lacks_peer and not self._members.joins_again(index):
            self._console.say(f"{former.name} lost a peer, so it is not started again alone")
            return failure(former)
        self._members.start_trainer(index)
        return None

    def _died(self, process: Process, role: str, index: int) -> Outcome | None:
        """Schedules a restart of a process, unless it died too often."""
        budget = self._budgets[role][index]
        if role == "server" and process.status == PORT_TAKEN:
            budget = self._taken[index]
        if role == "server" and self.servers.failed_to_start(index):
            return None
        if role == "trainer" and self.scaling.came_too_late(index):
            return None
        if role == "trainer" and self.scaling.is_last(index):
            return failure(process)
        delay_s = budget.spend(process)
        if delay_s is None:
            if budget.why_none:
                self._console.complain(f"{process.name} is not started again: {budget.why_none}")
            goes_on = role == "trainer" and self.scaling.goes_on_without(index)
            return None if goes_on else failure(process)
        self._console.say(
            f"{process.name} {process.ending} after {process.seconds:.1f} s; "
            f"it is started again ({budget.count} of {budget.most})"
        )
        if role == "server" and process.status != PORT_TAKEN and self._members.spares.processes:
            delay_s = 0.0
        self._waiting.add((role, index))
        self._events.put_later(Due(index, role, self._members.start_number), delay_s)
        return None

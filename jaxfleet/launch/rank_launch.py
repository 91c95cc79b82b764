"""Launch of a job of ranks; a failure stops or restarts all of them."""

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from jaxfleet.env import PeriodicSaves, Rank, periodic_saves_environment, rank_environment
from jaxfleet.launch.job_spec import CollectiveJob
from jaxfleet.launch.placement import RankPlaces
from jaxfleet.launch.process import Process
from jaxfleet.launch.rendezvous_ends import MachineRendezvous, machine_rendezvous
from jaxfleet.launch.slots import RankEnd, Slots, lost_ranks
from jaxfleet.launch.starter import (
    Ended,
    Starter,
    Told,
    log_name,
    meeting_folder,
    periodic_saves,
    starting,
    with_secret,
)
from jaxfleet.launch.termination import Deadline, Ender, Outcome, failure, told
from jaxfleet.launch.whole_job import restarting

_KILLED = 128 + signal.SIGKILL
_SAY_S = 2.0  # lets ranks that do not wait for the lost one print a traceback


def launch_ranks(job: CollectiveJob, *, logs: Callable[[str, int], str] = log_name) -> int:
    """Runs this machine's ranks of a job, and returns an exit status.

    The ranks of a job depend on each other, so none goes on alone: the first failure stops all of
    them, after a moment for the others to report it. They are then restarted, up to the job's
    limit, with other ports and with `JAXFLEET_RESTART` one higher; the script resumes from its last
    checkpoint. Launches on other machines do the same as their ranks fail for lack of the stopped
    ones. If the job allows fewer ranks, a restart is without those that were lost, and without
    machines that are missing.

    The status is 0 when all ranks ended with 0; that of the first rank that failed in the last
    start (128 + n if signal n killed it); 128 + n when this process received signal n; 124 on a
    timeout. However the launch ends, even if it is killed, none of the ranks is left.
    """
    with ExitStack() as stack:
        places = RankPlaces(job)
        stack.callback(places.close)
        first = job.nodes.index * job.nproc
        # Their numbers are lower in a start without machines or ranks before them.
        most = range(0 if job.meets else first, first + job.nproc)
        names = {f"rank {rank}": logs("rank", rank) for rank in most}
        meeting, removed = meeting_folder(job, stack)
        job, secret = with_secret(job, stack)
        machines = None
        if job.meets:
            machines = machine_rendezvous(job, places.meeting_endpoint)
            stack.callback(machines.close)
        saves, saved = periodic_saves(job, stack)
        folders = [*secret, *removed, *saved]
        starter = stack.enter_context(starting(job, names, folders=folders))
        ranks = _Ranks(job, starter, places, machines, meeting=meeting, saves=saves)
        return restarting(job, starter, ranks)


class _Ranks:
    """The ranks of this machine, from start to start of the job."""

    def __init__(
        self,
        job: CollectiveJob,
        starter: Starter,
        places: RankPlaces,
        machines: MachineRendezvous | None,
        *,
        meeting: Path | None,
        saves: PeriodicSaves | None,
    ) -> None:
        self._meeting, self._saves = meeting, saves
        self._job, self._starter, self._places = job, starter, places
        self._machines, self._last_start = machines, -1
        self._console = starter.console
        self._deadline = Deadline(job)
        self._slots = Slots(job.nproc, job.enough_nproc)
        self._left_out: list[str] = []
        self._ranks: list[Process] = []
        self._failed: Process | None = None
        self._ended: Outcome | None = None  # while it waited for other machines

    def prepare(self, start: int) -> int | Outcome:
        lost = lost_ranks([self._end(process) for process in self._ranks])
        self._left_out = [self._ranks[at].name for at in lost]
        self._slots = self._slots.without(lost)
        own = len(self._slots.left)
        counts: Mapping[str, int] | None = None
        if not self._job.nodes.several:
            counts = {self._job.nodes.own: own}
        if self._machines is not None:
            found = self._machines.meet(own, self._last_start, self._has_ended)
            if found is None:
                assert self._ended is not None
                return self._ended
            start, counts = found.start, found.ranks
        self._last_start = start
        self._places.move(start, counts)
        return start

    def _has_ended(self, seconds: float) -> bool:
        """Whether a signal or the job's deadline ends the wait for other machines."""
        until = self._deadline.or_in(seconds).at
        while (event := self._starter.events.next(until)) is not None:
            if isinstance(event, Told):
                self._ended = told(event)
                return True
        if self._deadline.has_passed:
            self._ended = self._deadline.missed
        return self._ended is not None

    def _end(self, process: Process) -> RankEnd:
        return RankEnd(
            was_killed=process.told is None and process.status == _KILLED,
            is_first=process is self._failed,
            lacks_peer=process.lacks_peer,
        )

    def describe_restart(self, count: str) -> str:
        what = f"all ranks are started again ({count}), each from what it has saved"
        if not self._job.is_elastic:
            return what
        most, left = len(self._job.nodes.names) * self._job.nproc, len(self._places.endpoints)
        lost = f"; {', '.join(self._left_out)} failed" if self._left_out else ""
        return f"{what}; {left} of {most} ranks are left{lost}"

    def run(self, start: int) -> Outcome:
        self._ranks, self._failed = [], None
        self._start(start)
        outcome = self._watch()
        self._failed = outcome.failed
        return outcome

    def stop(self, ender: Ender, outcome: Outcome, *, is_last: bool) -> Sequence[Process]:
        del is_last  # there are no spares
        ender.stop(self._ranks, outcome.number)
        return self._ranks

    def _start(self, start: int) -> None:
        where = self._places.endpoints[0]
        self._console.say(f"{len(self._places.endpoints)} ranks, the first at {where}")
        for rank in self._places.ranks:
            self._places.give(rank)
            environment = self._environment(rank, start)
            process = self._starter.start(f"rank {rank}", self._job.command, environment)
            self._ranks.append(process)
            self._console.say(f"{process.name}: process {process.pid}")

    def _environment(self, rank: int, start: int) -> Mapping[str, str]:
        job = self._job
        each = len(job.gpus or ()) // job.nproc
        first = self._slots.left[self._places.ranks.index(rank)] * each
        environment = rank_environment(
            Rank(
                rank=rank,
                endpoints=self._places.endpoints,
                job=job.name,
                secret_file=job.secret,
                restart=start,
                # Every start has its own folder, without files of the last one.
                meeting_dir=None if self._meeting is None else self._meeting / f"start-{start}",
                gpus=(job.gpus or ())[first : first + each],
                cpu_devices=job.cpu_devices,
                proxies=job.proxies,
            )
        )
        return {**environment, **periodic_saves_environment(self._saves)}

    def _watch(self) -> Outcome:
        while not all(rank.status == 0 for rank in self._ranks):
            match self._starter.events.next(self._deadline.at):
                case None:
                    return self._deadline.missed
                case Told() as event:
                    return told(event)
                case Ended(process) if process.status and process in self._ranks:
                    self._let_others_say()
                    return failure(process)
        return Outcome(0)

    def _let_others_say(self) -> None:
        """Waits a moment: ranks that learn of a failure report it and end themselves."""
        events, until = self._starter.events, self._deadline.or_in(_SAY_S)
        while any(rank.status is None for rank in self._ranks):
            event = events.next(until.at)
            if isinstance(event, Told):
                events.put(event)  # the signal that stopped the launch ends this wait too
            if event is None or isinstance(event, Told):
                return

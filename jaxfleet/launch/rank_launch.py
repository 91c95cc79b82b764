"""Launch of a job of ranks; a failure stops or restarts all of them."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from jaxfleet.env import PeriodicSaves, Rank, periodic_saves_environment, rank_environment
from jaxfleet.launch.job_spec import CollectiveJob
from jaxfleet.launch.placement import RankPlaces
from jaxfleet.launch.process import Process
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

_SAY_S = 2.0  # lets ranks that do not wait for the lost one print a traceback


def launch_ranks(job: CollectiveJob, *, logs: Callable[[str, int], str] = log_name) -> int:
    """Runs this machine's ranks of a job, and returns an exit status.

    The ranks of a job depend on each other, so none goes on alone: the first failure stops all of
    them, after a moment for the others to report it. They are then restarted, up to the job's
    limit, with other ports and with `JAXFLEET_RESTART` one higher; the script resumes from its last
    checkpoint. Launches on other machines do the same as their ranks fail for lack of the stopped
    ones.

    The status is 0 when all ranks ended with 0; that of the first rank that failed in the last
    start (128 + n if signal n killed it); 128 + n when this process received signal n; 124 on a
    timeout. However the launch ends, even if it is killed, none of the ranks is left.
    """
    with ExitStack() as stack:
        places = RankPlaces(job)
        stack.callback(places.close)
        places.move(0)
        names = {f"rank {rank}": logs("rank", rank) for rank in places.ranks}
        meeting, removed = meeting_folder(job, stack)
        job, secret = with_secret(job, stack)
        saves, saved = periodic_saves(job, stack)
        folders = [*secret, *removed, *saved]
        starter = stack.enter_context(starting(job, names, folders=folders))
        return _Launch(job, starter, places, meeting, saves).run()


class _Launch:
    """A job from its first start to its end."""

    def __init__(
        self,
        job: CollectiveJob,
        starter: Starter,
        places: RankPlaces,
        meeting: Path | None,
        saves: PeriodicSaves | None,
    ) -> None:
        self._meeting, self._saves = meeting, saves
        self._job, self._starter, self._places = job, starter, places
        self._console = starter.console
        self._deadline = Deadline(job)
        self._ranks: list[Process] = []

    def run(self) -> int:
        start, most = 0, self._job.max_restarts
        while True:
            outcome = self._once(start)
            if outcome.failed is None or start == most:
                return outcome.status
            start += 1
            self._places.move(start)
            self._console.complain(
                f"all ranks are started again ({start} of {most}), each from what it has saved"
            )

    def _once(self, start: int) -> Outcome:
        ender, outcome = Ender(self._job, self._starter), Outcome(1, "the launch itself failed")
        self._ranks = []
        try:
            self._start(start)
            outcome = self._watch()
        finally:
            if outcome.why:
                self._console.complain(f"{outcome.why}; stopping all")
            ender.stop(self._ranks, outcome.number)
            ender.report(self._ranks, outcome.failed)
        if ender.told is not None and outcome.failed is not None:
            return told(ender.told)  # a signal forbids a restart
        return outcome

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
        first = self._places.ranks.index(rank) * each
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

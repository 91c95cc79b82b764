"""Starts of a whole job, each after a failure of the last that nothing else mends."""

from collections.abc import Iterable
from typing import Protocol

from jaxfleet.launch.job_spec import AnyJob
from jaxfleet.launch.process import Process
from jaxfleet.launch.starter import Starter
from jaxfleet.launch.termination import Ender, Outcome, told


class WholeJob(Protocol):
    """This machine's processes of a job, from start to start."""

    def prepare(self, start: int) -> int | Outcome:
        """Makes ready for a start, the first included.

        Returns:
            Its number, a higher one if other machines have started without this one; the outcome of
            the job if it cannot start.
        """
        ...

    def run(self, start: int) -> Outcome:
        """Starts all processes, and waits for the end of the job or a failure."""
        ...

    def stop(self, ender: Ender, outcome: Outcome, *, is_last: bool) -> Iterable[Process]:
        """Stops all processes, and returns those to report; no start follows the last one."""
        ...

    def describe_restart(self, count: str) -> str:
        """Describes a start that follows; `count` is its number and their limit: `1 of 3`."""
        ...


def restarting(job: AnyJob, starter: Starter, whole: WholeJob) -> int:
    """Starts a job until it ends well or no restart is left; returns its exit status."""
    most, console = job.max_restarts, starter.console
    start = whole.prepare(0)
    while not isinstance(start, Outcome):
        outcome = _once(job, starter, whole, start)
        if outcome.failed is None or start >= most:
            return outcome.status
        start = whole.prepare(start + 1)
        if not isinstance(start, Outcome):
            console.complain(whole.describe_restart(f"{start} of {most}"))
    console.complain(start.why)
    return start.status


def _once(job: AnyJob, starter: Starter, whole: WholeJob, start: int) -> Outcome:
    """Runs one start, and stops and reports all its processes."""
    ender, outcome = Ender(job, starter), Outcome(1, "the launch itself failed")
    try:
        outcome = whole.run(start)
    finally:
        if outcome.why:
            starter.console.complain(f"{outcome.why}; stopping all")
        is_last = outcome.failed is None or start >= job.max_restarts
        processes = whole.stop(ender, outcome, is_last=is_last)
        ender.report(processes, outcome.failed)
    if ender.told is not None and outcome.failed is not None:
        return told(ender.told)  # a signal forbids a restart
    return outcome

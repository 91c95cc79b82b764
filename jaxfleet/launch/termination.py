"""Termination of a job: its cause, stopping its processes, and the report."""

import copy
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from jaxfleet.launch.job_spec import AnyJob
from jaxfleet.launch.process import Process
from jaxfleet.launch.starter import Starter, Told
from jaxfleet.observability import LongWait

_FOREVER = 10 * 365 * 86400.0
_KILL_S = 10.0
_NO_PADDLE = "No module named 'paddle'"
_COMPAT = "begin the script with: import jaxfleet.compat; jaxfleet.compat.install()"
_ON_SCREEN = 30  # lines after which a process's last output is off the screen
_TIMED_OUT = 124  # as in coreutils' timeout


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    status: int  # the launch's exit status
    why: str = ""  # what ended it, unless it ended by itself
    failed: Process | None = None  # the process that ended it
    number: signal.Signals = signal.SIGTERM  # signal that stops the trainers


def failure(process: Process) -> Outcome:
    """Returns the outcome of a job in which a process failed."""
    assert process.status is not None
    why = f"{process.name} {process.ending} after {process.seconds:.1f} s"
    return Outcome(process.status, why, process)


def told(event: Told) -> Outcome:
    """Returns the outcome of a job stopped by a signal."""
    number = event.number
    if number is signal.SIGPIPE:
        return Outcome(128 + number, "the reader of the output has closed it")
    sent = signal.SIGINT if number is signal.SIGINT else signal.SIGTERM
    return Outcome(128 + number, f"got {number.name}", number=sent)


class Deadline:
    """The time by which a job must be done, on `time.monotonic`."""

    def __init__(self, job: AnyJob) -> None:
        self._limit_s = job.timeout_s
        self.at = time.monotonic() + (_FOREVER if job.timeout_s is None else job.timeout_s)

    def or_in(self, seconds: float) -> "Deadline":
        """Returns the earlier of this deadline and one in `seconds`."""
        sooner = copy.copy(self)
        sooner.at = min(self.at, time.monotonic() + seconds)
        return sooner

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self.at

    @property
    def missed(self) -> Outcome:
        return Outcome(_TIMED_OUT, f"the job was not done after {self._limit_s:g} s")


class Ender:
    """Stops processes, and reports how they ended.

    Attributes:
        told: the first signal received meanwhile; it shortens all further waits.
    """

    def __init__(self, job: AnyJob, starter: Starter) -> None:
        self._grace_s = job.grace_s
        self._console, self._events = starter.console, starter.events
        self.told: Told | None = None

    def stop(self, processes: Iterable[Process], number: signal.Signals) -> None:
        """Ends processes, with a grace period unless a second signal arrives."""
        running = list(processes)
        for process in running:
            process.tell(number)
        self._wait(running, self._grace_s, patient=True)
        for process in running:
            if not process.gone:
                process.tell(signal.SIGKILL)
        self._wait(running, _KILL_S, patient=False)

    def _wait(self, processes: Sequence[Process], seconds: float, *, patient: bool) -> None:
        """Waits until processes and their descendants are gone and their output was shown."""
        deadline, wait = time.monotonic() + seconds, LongWait(say=self._console.say)
        while not all(process.gone for process in processes):
            if patient and self.told is not None:
                return
            left = [process.name for process in processes if not process.gone]
            describe = partial("waiting for {} to end".format, ", ".join(left))
            event = self._events.awaited(deadline, wait, describe)
            if event is None:
                return
            if isinstance(event, Told) and self.told is None:
                self.told = event

    def report(self, processes: Iterable[Process], failed: Process | None) -> None:
        """Reports how each process ended.

        The last lines of the failed one are repeated only if lines of other processes have pushed
        them off the screen.
        """
        is_far_up = failed is not None and self._console.lines_since(failed.name) > _ON_SCREEN
        for process in processes:
            self._console.say(f"{process.name} {process.ending}, {process.seconds:.1f} s")
        if failed is None:
            return
        if failed.last:
            if is_far_up:
                self._console.complain(f"the last lines of {failed.name}:")
                self._console.show(failed.name, failed.last, error=True)
            if any(_NO_PADDLE in line for line in failed.last):
                self._console.complain(f"  hint: {_COMPAT}")
        else:
            self._console.complain(f"{failed.name} wrote nothing")
        above = "; its last lines are above" if failed.last and not is_far_up else ""
        self._console.complain(f"{failed.name} {failed.ending}{above}")

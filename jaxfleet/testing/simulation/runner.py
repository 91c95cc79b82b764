"""Runs many schedules, and reduces those that fail to the faults that the failure needs."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jaxfleet.testing.simulation.invariants import broken
from jaxfleet.testing.simulation.job import run_schedule
from jaxfleet.testing.simulation.run import Run
from jaxfleet.testing.simulation.schedule import Schedule, draw_schedule
from jaxfleet.testing.simulation.workload import Mode

COMMAND = "python -m jaxfleet.testing.simulation"


@dataclass(frozen=True)
class Failure:
    """A schedule that breaks invariants.

    Attributes:
        schedule: reduced to the faults that it needs.
        left_out: the numbers of the other faults.
        broken: what the reduced schedule breaks.
    """

    schedule: Schedule
    left_out: frozenset[int]
    broken: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command that plays it again."""
        without = ",".join(map(str, sorted(self.left_out)))
        return f"{COMMAND} --seed {self.schedule.seed}" + (f" --without {without}" * bool(without))

    def __str__(self) -> str:
        lines = [str(self.schedule), *(f"  breaks: {what}" for what in self.broken)]
        return "\n".join([*lines, f"  play it again: {self.command}"])


@functools.cache
def undisturbed(mode: Mode) -> Run:
    """Returns the run of a job without faults."""
    return run_schedule(Schedule(0, mode, keeps_checkpoints=False, pace_s=(0.1, 0.1), faults={}))


def check(
    schedule: Schedule, trace: Callable[[str], None] | None = None
) -> tuple[Run, tuple[str, ...]]:
    """Runs a schedule, and returns what it breaks."""
    expected = undisturbed(schedule.mode)
    run = run_schedule(schedule, trace)
    return run, tuple(broken(run, expected))


def shrink(schedule: Schedule) -> Failure | None:
    """Leaves out faults while some invariant stays broken; None if none is broken.

    Which one may change: a schedule with fewer faults is as good an example.
    """
    _, found = check(schedule)
    if not found:
        return None
    left_out: set[int] = set()
    smaller = True
    while smaller:
        smaller = False
        for number in sorted(schedule.faults.keys() - left_out):
            _, still = check(schedule.without(left_out | {number}))
            if still:
                left_out.add(number)
                found, smaller = still, True
    return Failure(schedule.without(left_out), frozenset(left_out), found)


def explore(seeds: Iterable[int], mode: Mode | None = None) -> Iterator[Failure]:
    """Yields the failures of many schedules, reduced."""
    for seed in seeds:
        schedule = draw_schedule(seed, mode)
        if check(schedule)[1]:
            failure = shrink(schedule)
            if failure is None:
                what = "a schedule broke an invariant once, and not again: it is not deterministic"
                failure = Failure(dataclasses.replace(schedule), frozenset(), (what,))
            yield failure

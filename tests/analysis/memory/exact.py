"""Optimal choice of values to keep and operators to rerun, for small graphs: an integer program.

Each forward value is kept, or is recomputed at most once, right before the first operator after
forward that needs it or a value derived from it. Operators run one by one, and memory is counted
at each: no plan of executables can do better. This is the problem of Jain et al. (2020,
"Checkmate"), without their repeated recomputation, and so with few enough variables.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from jaxfleet.analysis.memory.costs import Costs, TemporaryBytes
from jaxfleet.analysis.memory.live_ranges import LiveRange, live_ranges
from jaxfleet.analysis.memory.ordering import ScheduleConstraints, schedule_constraints
from jaxfleet.ir import Program

LIMIT_S = 60.0  # of one solution; they take less than one


@dataclass(frozen=True)
class Step:
    """A step as the integer program sees it: forward by number, the rest by time.

    Attributes:
        names: by forward operator, its output variable.
        bytes: of that.
        costs: of running it.
        parents: by forward operator, those whose values it reads.
        last: by forward operator, the last one that reads its value.
        needs: by forward operator, the times after forward at which its value is read.
        late: by time, the bytes produced after forward.
    """

    names: tuple[str, ...]
    bytes: tuple[int, ...]
    costs: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    late: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """A choice of kept values, with its memory and cost.

    Attributes:
        kept: names of forward values.
        peak: in bytes.
        cost: of recomputation.
    """

    kept: frozenset[str]
    peak: int
    cost: int


def step_of(program: Program, sizes: Mapping[str, int]) -> Step:
    """Returns the step of a program whose forward operators produce one value each."""
    values = live_ranges(program, TemporaryBytes(program, sizes))
    phases = schedule_constraints(program, values)
    made = {value.made: value for value in values if value.made in phases.position}
    made = {place: made[place] for place in phases.forward}
    number = {place: index for index, place in enumerate(made)}
    order = sorted(phases.at, key=lambda place: (-phases.at[place], place))
    time = {place: index for index, place in enumerate(order)}
    costs = Costs(program, sizes)
    return Step(
        names=tuple(value.name for value in made.values()),
        bytes=tuple(value.bytes for value in made.values()),
        costs=tuple(costs.of(program.root.ops[place]) for place in made),
        parents=tuple(
            tuple(number[v.made] for v in made.values() if place in v.reads) for place in made
        ),
        last=tuple(
            max((number[x] for x in v.reads if x in number), default=number[v.made])
            for v in made.values()
        ),
        needs=tuple(tuple(sorted(time[x] for x in v.reads if x in time)) for v in made.values()),
        late=_late(values, phases, time),
    )


def _late(
    values: Sequence[LiveRange], phases: ScheduleConstraints, time: Mapping[int, int]
) -> tuple[int, ...]:
    held = [0] * len(time)
    for value in values:
        if value.made in phases.at:
            end = max((time[x] for x in value.reads), default=time[value.made])
            for at in range(time[value.made], end + 1):
                held[at] += value.bytes
    return tuple(held)


def run(step: Step, kept: Collection[str]) -> Choice:
    """Returns the memory and cost of a choice of kept values, by simulating the step."""
    keeps = {n for n, name in enumerate(step.names) if name in kept}
    peak = 0
    for at in range(len(step.names)):
        alive = (n for n in range(at + 1) if n in keeps or step.last[n] >= at)
        peak = max(peak, sum(step.bytes[n] for n in alive))
    times = _times(step, keeps)
    for at, late in enumerate(step.late):
        alive = (n for n in range(len(step.names)) if _is_held(step, n, at, keeps, times))
        peak = max(peak, late + sum(step.bytes[n] for n in alive))
    return Choice(frozenset(kept), peak, sum(step.costs[n] for n in times))


def _times(step: Step, keeps: Collection[int]) -> dict[int, int]:
    """Returns the times at which values are recomputed."""
    found: dict[int, int] = {}
    for number in reversed(range(len(step.names))):
        children = [n for n in found if number in step.parents[n]]
        needs = [*step.needs[number][:1], *(found[n] for n in children)]
        if needs and number not in keeps:
            found[number] = min(needs)
    return found


def _is_held(
    step: Step, number: int, at: int, keeps: Collection[int], times: Mapping[int, int]
) -> bool:
    if number not in keeps and times.get(number, at + 1) > at:
        return False
    later = [*step.needs[number][-1:], *(t for n, t in times.items() if number in step.parents[n])]
    return max(later, default=-1) >= at


def exact_for(step: Step, budget: int) -> Choice:
    return run(step, _Model(step).solve(step.costs, budget))


def exact_smallest(step: Step) -> Choice:
    """Returns a choice of minimal peak."""
    return run(step, _Model(step).solve(None, None))


class _Model:
    """The integer program: columns are variables, rows are `low <= sum <= high`.

    For each value: is it kept; for each possible time of recomputation, is it recomputed then; for
    each time from there on, is it held. One more variable is the peak.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.columns = 1  # the first is the peak
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.kept = [self._column() for _ in step.names]
        self.again = [{t: self._column() for t in self._may_be_made(n)} for n in self._all]
        self.integers = self.columns
        self.held = [{t: self._column() for t in range(len(step.late))} for _ in step.names]
        for number in self._all:
            self._make_once(number)
            self._make_in_time(number)
            self._hold(number)
        self._count_bytes()

    @property
    def _all(self) -> range:
        return range(len(self.step.names))

    def solve(self, costs: Sequence[int] | None, budget: int | None) -> set[str]:
        """Returns the names to keep; without costs, those that minimize the peak."""
        goal = np.zeros(self.columns)
        if costs is None:
            goal[0] = 1
        for number, cost in enumerate(costs or ()):
            goal[list(self.again[number].values())] = cost
        high = np.ones(self.columns)
        high[0] = np.inf if budget is None else budget
        rows, columns, factors = zip(*self.entries, strict=True)
        matrix = coo_array((factors, (rows, columns)), shape=(len(self.low), self.columns))
        done = milp(
            goal,
            integrality=np.arange(self.columns) < self.integers,
            bounds=Bounds(0, high),
            constraints=LinearConstraint(matrix.tocsr(), self.low, np.inf),
            options={"time_limit": LIMIT_S},
        )
        assert done.status == 0, done.message
        return {self.step.names[n] for n in self._all if done.x[self.kept[n]] > 0.5}

    def _column(self) -> int:
        self.columns += 1
        return self.columns - 1

    def _row(self, low: float, *terms: tuple[int, float]) -> None:
        self.entries += [(len(self.low), column, factor) for column, factor in terms]
        self.low.append(low)

    def _may_be_made(self, number: int) -> list[int]:
        """Returns the times at which a value, or a value derived from it, is first needed."""
        found, waiting = set[int](), [number]
        seen = {number}
        while waiting:
            at = waiting.pop()
            found.update(self.step.needs[at][:1])
            children = [n for n in self._all if at in self.step.parents[n]]
            waiting += [n for n in children if n not in seen]
            seen.update(children)
        return sorted(found)

    def _made_by(self, number: int, time: int) -> list[tuple[int, float]]:
        """Returns the terms whose sum indicates whether a value is available at a time."""
        made = [(column, 1.0) for t, column in self.again[number].items() if t <= time]
        return [(self.kept[number], 1.0), *made]

    def _make_once(self, number: int) -> None:
        ever = [(self.kept[number], -1.0), *((x, -1.0) for x in self.again[number].values())]
        self._row(-1, *ever)

    def _make_in_time(self, number: int) -> None:
        for time in self.step.needs[number][:1]:
            self._row(1, *self._made_by(number, time))
        for child in self._children(number):
            for time, column in self.again[child].items():
                self._row(0, *self._made_by(number, time), (column, -1.0))

    def _hold(self, number: int) -> None:
        last = max(self.step.needs[number], default=-1)
        for time, held in self.held[number].items():
            there = [(column, -factor) for column, factor in self._made_by(number, time)]
            if time <= last:
                self._row(0, (held, 1.0), *there)
                continue
            for child in self._children(number):  # it waits for a later use by its children
                later = [(x, -1.0) for t, x in self.again[child].items() if t >= time]
                if later:
                    self._row(-1, (held, 1.0), *there, *later)

    def _children(self, number: int) -> list[int]:
        return [n for n in self._all if number in self.step.parents[n]]

    def _count_bytes(self) -> None:
        step = self.step
        for at in self._all:
            fixed = sum(step.bytes[n] for n in range(at + 1) if step.last[n] >= at)
            free = [n for n in range(at + 1) if step.last[n] < at]
            self._row(fixed, (0, 1.0), *((self.kept[n], -float(step.bytes[n])) for n in free))
        for time, late in enumerate(step.late):
            held = ((self.held[n][time], -float(step.bytes[n])) for n in self._all)
            self._row(late, (0, 1.0), *held)

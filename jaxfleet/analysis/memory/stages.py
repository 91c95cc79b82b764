"""Construction of the chain of stages of a training step.

Lowering donates a temporary that an executable reads last to an output of the same type
(`lower.staged`). That saves memory if the old value is read before the new one is written;
otherwise XLA copies it first.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxfleet.analysis.flow import Effects
from jaxfleet.analysis.memory.chain import (
    Chain,
    Forward,
    IntervalSums,
    Level,
    RecomputeNeeds,
    Span,
    Table,
    reversed_table,
)
from jaxfleet.analysis.memory.costs import ELEMENT, Costs, TemporaryBytes
from jaxfleet.analysis.memory.cuts import cut_positions
from jaxfleet.analysis.memory.live_ranges import (
    InnerPeaks,
    LiveRange,
    fused_ranges,
    is_elementwise,
    live_ranges,
)
from jaxfleet.analysis.memory.ordering import ScheduleConstraints, schedule_constraints
from jaxfleet.errors import PassError
from jaxfleet.ir import Program


class StagedStep:
    """A step, cut into stages.

    `made` are the forward values and `late` those made after forward, as the program has them;
    `held` and `late_held` are the same, as a compiler leaves them inside an executable.
    """

    def __init__(
        self,
        program: Program,
        values: Sequence[LiveRange],
        phases: ScheduleConstraints,
        starts: Sequence[int],
    ) -> None:
        self.program = program
        self.ops = program.root.ops
        self.starts = [phases.forward[start] for start in starts]
        self.count = len(starts)
        self.made = [value for value in values if value.made in phases.position]
        after = fused_ranges(program, values)
        self.held = [value for value in after if value.made in phases.position]
        self.late = [value for value in values if value.made in phases.at]
        self.late_held = [value for value in after if value.made in phases.at]
        bounds = np.searchsorted(starts, np.arange(len(phases.forward)), side="right") - 1
        self._stage: list[int] = bounds.tolist()
        self.phases = phases

    def of(self, place: int) -> int:
        """Returns the stage of an operator, also of one after forward."""
        position = self.phases.position
        return self._stage[position[place] if place in position else self.phases.at[place]]

    def late_order(self) -> list[int]:
        """Returns the operators after forward, each right before the first that waits for it.

        A program may contain all gradient clipping before the first update; it never runs that way.
        """
        needs: dict[int, list[int]] = {}
        is_read = set[int]()
        for value in self.late:
            inside = [x for x in value.reads if x in self.phases.at and x != value.made]
            is_read.update([value.made] if inside else [])
            for place in inside:
                needs.setdefault(place, []).append(value.made)
        found: dict[int, None] = {}
        for last in sorted(self.phases.at.keys() - is_read):
            waiting = [last]
            while waiting:
                missing = [x for x in needs.get(waiting[-1], ()) if x not in found]
                if missing:
                    waiting += reversed(missing)
                else:
                    found[waiting.pop()] = None
        return list(found)

    def is_final(self, place: int) -> bool:
        """Whether a forward operator is in the last stage."""
        return self.of(place) == self.count - 1

    def last_forward(self, value: LiveRange) -> int:
        """Returns the last stage that reads a forward value in forward."""
        return self._stage[self.phases.last_forward(value)]

    def late_span(self, value: LiveRange) -> tuple[int, int, int]:
        """Returns the begin and the end of a value after forward, from the back, and its bytes."""
        last, begins, behind = self.count - 1, self.of(value.made), self.first_behind(value)
        return last - begins, last - (begins if behind is None else behind), value.bytes

    def first_behind(self, value: LiveRange) -> int | None:
        """Returns the first stage with which an operator after forward reads a value."""
        behind = [self.of(place) for place in value.reads if place not in self.phases.position]
        return min(behind, default=None)


def donated_bytes(stages: StagedStep) -> Table:
    """Returns `[p, c]`: the bytes of inputs donated to outputs, at most one pair of each type.

    Stages are counted from the back, in the order of backward.
    """
    count = stages.count
    by_type: dict[str, DonationPairs] = defaultdict(lambda: DonationPairs(count))
    size_of = dict[str, int]()
    for value in stages.late:
        begins, ends, size = stages.late_span(value)
        if size and begins < ends:
            kind = stages.program.lookup(value.name).type
            in_place = is_elementwise(stages.ops[value.made].type)
            by_type[kind].add(begins, ends, in_place=in_place)
            size_of[kind] = size
    found = np.zeros((count + 1, count + 1), np.int64)
    for kind, spans in by_type.items():
        found += size_of[kind] * spans.pairs()
    return found


class DonationPairs:
    """The begins and the ends of values of one type."""

    def __init__(self, count: int) -> None:
        self._enters = np.zeros((count, count + 1), np.int64)  # [last stage that reads it, p]
        self._leaves = np.zeros((count, count + 1), np.int64)  # [stage, c]: made there or later

    def add(self, begins: int, ends: int, *, in_place: bool) -> None:
        """Adds a value; `in_place` if it may overwrite its operand."""
        self._enters[ends, begins + 1 : ends + 1] = 1
        self._leaves[: begins + in_place, begins + 1 : ends + 1] = 1

    def pairs(self) -> Table:
        """Returns `[p, c]`: whether an input is read before an output is made."""
        found: Table = (self._enters.T @ self._leaves > 0).astype(np.int64)
        return found


_MOST_LEVELS = 6
_FEW_VALUES = 30  # up to this number, each is kept alone and left out alone


def stages_of(program: Program, sizes: Mapping[str, int], *, keep: Iterable[str] = ()) -> Chain:
    """Returns the stages of a training step, with the cost and memory of groups of them.

    The step has roles: a captured one, or fluid's. One without a forward part is a PassError.
    """
    counted = TemporaryBytes(program, sizes, keep=keep)
    values = live_ranges(program, counted)
    phases = schedule_constraints(program, values)
    if not phases.forward:
        what = f"program '{program.name}' has no forward operators, so nothing can run again"
        raise PassError(what, hint="give it a training step, with roles")
    starts = cut_positions(_crossing(values, phases))
    stages = StagedStep(program, values, phases, starts)
    inner, costs = InnerPeaks(program, counted), Costs(program, sizes)
    return _Tables(stages, inner, costs).chain()


def _crossing(values: Sequence[LiveRange], phases: ScheduleConstraints) -> Table:
    """Returns, by position, the bytes made before it that forward reads at it or later."""
    steps = np.zeros(len(phases.forward) + 1, np.int64)
    for value in values:
        if value.made in phases.position:
            steps[phases.position[value.made] + 1] += value.bytes
            steps[phases.last_forward(value) + 1] -= value.bytes
    return np.cumsum(steps)[:-1]


@dataclass(frozen=True)
class _Tables:
    """Builds the tables of a chain."""

    stages: StagedStep
    inner: InnerPeaks
    costs: Costs

    def chain(self) -> Chain:
        at, forward = self.stages, self._forward()
        spans = [(span.begins, span.ends, span.bytes) for span in forward.values]
        crossing = IntervalSums(at.count, spans).leaving()
        stored = self._choices(forward)
        work = [self._work(chosen) for chosen in (stored[0], stored[-1])]
        backward = self._backward(work[-1])
        levels = []
        for number, chosen in enumerate(stored):
            again, saved = self._needs(forward, chosen)
            during = work[-1] if number == len(stored) - 1 else work[0]
            held = np.maximum(crossing + saved + during, backward)
            levels.append(Level(chosen, again, saved, during, held))
        return Chain(tuple(at.starts), tuple(levels), crossing, backward, forward)

    def _forward(self) -> Forward:
        at = self.stages
        number = {id(value): index for index, value in enumerate(at.made)}
        position = at.phases.position
        reads: list[list[int]] = [[] for _ in at.phases.forward]
        ending: list[list[int]] = [[] for _ in range(at.count)]
        spans = []
        for value in at.made:
            begins, ends = at.of(value.made), at.last_forward(value)
            spans.append(Span(value.name, value.bytes, begins, ends))
            ending[ends].append(number[id(value)])
            for place in value.reads:
                if place in position:
                    reads[position[place]].append(number[id(value)])
        return Forward(
            values=tuple(spans),
            maker=tuple(position[value.made] for value in at.made),
            is_residual=tuple(at.first_behind(value) is not None for value in at.made),
            costs=tuple(self._again_costs()),
            reads=tuple(tuple(numbers) for numbers in reads),
            ending=tuple(tuple(numbers) for numbers in ending),
        )

    def _again_costs(self) -> Iterator[int]:
        """Yields the cost of rerunning each forward operator.

        An operator that only backward reads runs once in any case. An operator that a compiler
        merges with its readers is computed while these wait for memory.
        """
        at, is_stored = self.stages, set[int]()
        needed = {op for op, place in enumerate(at.phases.forward) if at.is_final(place)}
        for number in reversed(range(len(at.made))):
            value, held = at.made[number], at.held[number]
            op = at.phases.position[value.made]
            if not value.bytes or any(at.phases.position.get(x) in needed for x in value.reads):
                needed.add(op)
            if held.bytes or not value.bytes:
                is_stored.add(op)
        for op, place in enumerate(at.phases.forward):
            cost = self.costs.of(at.ops[place]) if op in needed else 0
            yield cost if op in is_stored else cost // ELEMENT

    def _choices(self, forward: Forward) -> list[frozenset[int]]:
        """Returns the values that each level keeps: the costliest per byte first, in growing sets.

        Every level keeps the values that may not be recomputed and those that take no bytes. No
        level keeps a value that a compiler never writes to memory: its readers recompute it.
        """
        at = self.stages
        ops = [at.ops[place] for place in at.phases.forward]
        effects = Effects()
        worth: dict[int, float] = {}
        for number, (span, maker) in enumerate(zip(forward.values, forward.maker, strict=True)):
            if not span.bytes or effects.runs_once(ops[maker]):
                worth[number] = np.inf
            elif at.held[number].bytes:
                worth[number] = forward.costs[maker] / span.bytes
        limits = _thinned(sorted({x for x in worth.values() if x != np.inf}, reverse=True))
        chosen = [frozenset(n for n, x in worth.items() if x >= limit) for limit in limits]
        always = frozenset(n for n, x in worth.items() if x == np.inf)
        every, free = frozenset(worth), sorted(worth.keys() - always)
        if len(free) <= _FEW_VALUES:
            chosen = [*(every - {n} for n in free), *(always | {n} for n in free), *chosen]
        return [always, *chosen]

    def _needs(self, forward: Forward, stored: frozenset[int]) -> tuple[Table, Table]:
        count = self.stages.count
        again, saved = np.zeros((2, count + 1, count + 1), np.int64)
        for first in range(count):
            need = RecomputeNeeds(forward, first, stored)
            for end in range(first + 1, count + 1):
                need.add_stage()
                again[first, end], saved[first, end] = need.again_cost, need.saved_bytes
        return again, saved

    def _work(self, stored: frozenset[int]) -> Table:
        """Returns the temporary bytes while groups run forward and keep some residuals."""
        at = self.stages
        short, longer = [], []
        for number, value in enumerate(at.held):
            if number in stored and at.first_behind(value) is not None:
                continue
            begins, ends = at.of(value.made), at.last_forward(value)
            longer.append((begins, ends, value.bytes if begins < ends else 0))
            short += [value] if begins == ends else []
        own = self._own(at.phases.forward, short)
        return IntervalSums(at.count, longer).peak_inside(own)

    def _backward(self, again: Table) -> Table:
        """Returns the bytes that the backward of each group holds, recomputed values included.

        All recomputed values exist when its backward begins, and are released as it reads them.
        """
        at, last = self.stages, self.stages.count - 1
        again_made, until, late = [], [], []
        for value in at.held:
            behind, made = at.first_behind(value), at.of(value.made)
            if behind is not None:
                first, end = min(made, behind), max(made, behind)
                again_made.append((first, end, value.bytes))
                until.append((last - end, last - first, last - behind, value.bytes))
                late.append((last - made, last - behind, value.bytes))
        crossing = [*late, *(at.late_span(value) for value in at.late)]
        inner = [at.late_span(value) for value in at.late_held]
        short = [v for v in at.late_held if at.late_span(v)[0] == at.late_span(v)[1]]
        own = self._own(at.late_order(), short)
        between = IntervalSums(at.count, crossing)
        outside = reversed_table(between.entering() + between.leaving() - donated_bytes(at))
        longer = IntervalSums(at.count, [span for span in inner if span[0] < span[1]])
        inside = reversed_table(longer.peak_inside(own[::-1], until))
        found: Table = outside + np.maximum(
            inside, IntervalSums(at.count, again_made).inside() + again
        )
        return found

    def _own(self, places: Sequence[int], values: Iterable[LiveRange]) -> Table:
        """Returns, by stage, the peak bytes of values that are made and last read in it."""
        at = self.stages
        begins, ends = Counter[int](), Counter[int]()
        turn = {place: number for number, place in enumerate(places)}
        for value in values:
            reads = (x for x in value.reads if x in turn)
            begins[value.made] += value.bytes
            ends[max(reads, default=value.made, key=turn.__getitem__)] += value.bytes
        peaks = np.zeros(at.count, np.int64)
        alive = [0] * at.count
        for place in places:
            stage = at.of(place)
            alive[stage] += begins[place]
            peaks[stage] = max(peaks[stage], alive[stage] + self.inner.of(at.ops[place].blocks))
            alive[stage] -= ends[place]
        return peaks


def _thinned(limits: Sequence[float]) -> Sequence[float]:
    """Returns at most a few of the limits, the last among them."""
    if len(limits) <= _MOST_LEVELS:
        return limits
    picked = np.linspace(0, len(limits) - 1, _MOST_LEVELS).round().astype(int)
    return [limits[place] for place in sorted(set(picked.tolist()))]

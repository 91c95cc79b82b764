"""A training step as a chain of stages: the cost and the memory of each way to group them.

A group lies between any two cuts. Its numbers depend only on its ends, so they are tables: `[p, c]`
is the group of stages `p` to `c - 1`. A value is counted once, however many cuts it crosses: at the
first. A forward value begins where it is made and ends where it is last read, later on. A value
made after forward is made at a late stage and last read at an early one: its stages are counted
from the back, so that time runs the same way for both.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from jaxfleet.errors import PassError


@dataclass(frozen=True)
class Span:
    """One forward value, in stages."""

    name: str  # the variable that holds it
    bytes: int  # its counted size
    begins: int  # the stage that makes it
    ends: int  # the last stage that reads it in forward


@dataclass(frozen=True)
class Forward:
    """The values and the operators of the forward part, by number."""

    values: tuple[Span, ...]  # with their stages in forward
    maker: tuple[int, ...]  # by value, the operator that makes it
    is_residual: tuple[bool, ...]  # by value, whether an operator after forward reads it
    costs: tuple[int, ...]  # by operator, of running it
    reads: tuple[tuple[int, ...], ...]  # by operator, the forward values that it reads
    ending: tuple[tuple[int, ...], ...]  # by stage, the values that are last read there


class RecomputeNeeds:
    """The operators that a group must rerun for its backward, and the values that it must keep.

    A group begins empty at a stage and grows at its end: the needs of a shorter group are among
    those of a longer one. `stored` values are kept if needed.
    """

    def __init__(self, forward: Forward, first: int, stored: Collection[int]) -> None:
        self.again: set[int] = set()  # operators to rerun
        self.saved: set[int] = set()  # the kept ones among `stored`
        self.again_cost = self.saved_bytes = 0  # of these operators, of these values
        self._forward, self._first, self._stored = forward, first, stored
        self._end = first
        self._wanted: set[int] = set()  # values crossing the end, needed once they no longer do

    def add_stage(self) -> None:
        """Adds a stage to the group: values last read there no longer cross its end."""
        ending = self._forward.ending[self._end]
        self._end += 1
        for value in ending:
            if self._forward.is_residual[value] or value in self._wanted:
                self._need(value)

    def _need(self, value: int) -> None:
        forward, waiting = self._forward, [value]
        while waiting:
            number = waiting.pop()
            span, op = forward.values[number], forward.maker[number]
            if span.begins < self._first:
                continue
            if span.ends >= self._end:
                self._wanted.add(number)
            elif number in self._stored:
                if number not in self.saved:
                    self.saved.add(number)
                    self.saved_bytes += span.bytes
            elif op not in self.again:
                self.again.add(op)
                self.again_cost += forward.costs[op]
                waiting += forward.reads[op]


Table = NDArray[np.int64]


@dataclass(frozen=True)
class RecomputePlan:
    """Cuts of a step's forward part, and the values kept for its backward part.

    A value that crosses a cut is kept until its last read.
    """

    # places in block 0 of the first operator of each group but the first
    cuts: tuple[int, ...] = ()
    # by group, whether it keeps all that backward reads of it. The last group does: its backward
    # follows at once
    kept: tuple[bool, ...] = (True,)
    saved: frozenset[str] = frozenset()  # the values that the other groups keep; the rest is rerun


@dataclass(frozen=True)
class Level:
    """One rule, the same for all groups, for the values kept besides those crossing cuts."""

    stored: frozenset[int] = field(repr=False)  # forward values, by number, that are kept if needed
    again: Table = field(repr=False)  # `[p, c]`, the cost of rerunning what is needed and not kept
    saved: Table = field(repr=False)  # `[p, c]`, the bytes that are kept
    work: Table = field(repr=False)  # `[p, c]`, the temporary bytes while the group runs forward
    # `[p, c]`, the peak bytes while the group runs forward or backward, excluding what earlier
    # groups keep
    held: Table = field(repr=False)


@dataclass(frozen=True)
class StageGroup:
    """Stages that run together, and the values kept of them."""

    first: int  # the first stage
    end: int  # the stage after the last
    stored: frozenset[int]  # forward values, by number, that it keeps if needed


@dataclass(frozen=True)
class Chain:
    """A step with all its possible cuts."""

    places: tuple[int, ...]  # the place in block 0 of each stage's first operator
    levels: tuple[Level, ...]  # what groups may keep, from nothing to all that backward reads
    # `[p, c]`, the bytes that the group makes and later stages read
    crossing: Table = field(repr=False)
    # `[p, c]`, the bytes while its backward runs, excluding what earlier groups keep
    backward: Table = field(repr=False)
    forward: Forward = field(repr=False)

    @property
    def stages(self) -> int:
        return len(self.places)

    def need(self, group: StageGroup) -> RecomputeNeeds:
        """Returns the operators that a group must rerun, and the values that it keeps."""
        need = RecomputeNeeds(self.forward, group.first, group.stored)
        for _ in range(group.first, group.end):
            need.add_stage()
        return need

    def held(self, group: StageGroup, saved_bytes: int) -> int:
        """Returns the peak bytes while a group runs, excluding what earlier groups keep."""
        at = group.first, group.end
        level = self.levels[-1 if group.stored >= self.levels[-1].stored else 0]
        return int(max(self.crossing[at] + saved_bytes + level.work[at], self.backward[at]))

    def plan(self, groups: Sequence[StageGroup]) -> RecomputePlan:
        """Returns a plan in the program's terms."""
        values, saved = self.forward.values, set[str]()
        for group in groups[:-1]:
            saved.update(values[number].name for number in self.need(group).saved)
        cuts = tuple(self.places[group.first] for group in groups[1:])
        return RecomputePlan(cuts, (False,) * len(cuts) + (True,), frozenset(saved))

    def groups(self, plan: RecomputePlan) -> list[StageGroup]:
        """Returns the groups of a plan; raises a PassError unless the plan is one of this chain."""
        bounds = [0, *(self._stage(place) for place in plan.cuts), self.stages]
        if bounds != sorted(set(bounds)) or len(plan.kept) != len(bounds) - 1:
            raise PassError(f"cuts {plan.cuts} and kept {plan.kept} are not groups in order")
        values = enumerate(self.forward.values)
        saved = frozenset(number for number, span in values if span.name in plan.saved)
        return [
            StageGroup(first, end, self.levels[-1].stored if keep else saved)
            for (first, end), keep in zip(pairwise(bounds), plan.kept, strict=True)
        ]

    def _stage(self, place: int) -> int:
        if place not in self.places:
            raise PassError(f"operator {place} is not the first of a stage", hint="plan again")
        return self.places.index(place)


class IntervalSums:
    """Bytes of values, by where they begin and where they end.

    `grid[p, c]` with stages `p` and `c` from 0 to their number: cuts, the ends included.
    """

    def __init__(self, stages: int, spans: Iterable[tuple[int, int, int]]) -> None:
        """Builds the sums from the first stage, the last stage and the bytes of each value."""
        counts = np.zeros((stages + 1, stages + 1), np.int64)
        for begins, ends, size in spans:
            counts[begins + 1, ends + 1] += size
        self._sums: Table = counts.cumsum(0).cumsum(1)  # [a, b]: begins before a and ends before b
        self._diagonal = np.diagonal(self._sums)

    def inside(self) -> Table:
        """Returns `[p, c]`: values that begin at `p` or later and end before `c`."""
        return self._diagonal[None, :] - self._sums

    def leaving(self) -> Table:
        """Returns `[p, c]`: values that begin from `p` to `c - 1` and end at `c` or later."""
        to_the_end = self._sums[:, -1]
        return (to_the_end[None, :] - self._diagonal[None, :]) - (to_the_end[:, None] - self._sums)

    def entering(self) -> Table:
        """Returns `[p, c]`: values that begin before `p` and end at `p` or later."""
        row = self._sums[:, -1] - self._diagonal
        return np.repeat(row[:, None], len(row), axis=1)

    def peak_inside(self, own: Table, until: Iterable[tuple[int, int, int, int]] = ()) -> Table:
        """Returns `[p, c]`: the peak, over the group's stages, of the values that stay inside.

        `own` is, by stage, the peak of the values that begin and end in that one stage; `until` are
        spans with an additional stage, to which such a value is alive from the group's first stage.
        """
        stages, sums = len(own), self._sums
        peaks = np.zeros((stages + 1, stages + 1), np.int64)
        waiting = sorted(until, key=lambda span: span[2])
        for stage in range(stages):
            first, end = slice(0, stage + 1), slice(stage + 1, None)
            # Values that begin from p to the stage, and end from the stage to before c.
            alive = sums[stage + 1, end][None, :] - sums[first, end]
            alive = alive - (sums[stage + 1, stage] - sums[first, stage])[:, None]
            if waiting:
                waiting = [span for span in waiting if span[2] >= stage]
                there = IntervalSums(
                    stages, [(begins, ends, size) for begins, ends, _, size in waiting]
                )
                alive = alive + there.inside()[first, end]
            peaks[first, end] = np.maximum(peaks[first, end], alive + own[stage])
        return peaks


def reversed_table(table: Table) -> Table:
    """Converts a table over stages counted from the back to one counted forward."""
    return table[::-1, ::-1].T

"""Cut points of a step: between stages of its forward part, and between executables.

Inside one executable XLA:CPU runs independent operators concurrently and may hold all of their
values: four microbatches written out one after another take four times the memory of one. Several
executables run one after another, and compute each operator once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jaxfleet.analysis.memory.chain import IntervalSums, Table
from jaxfleet.analysis.memory.costs import TemporaryBytes
from jaxfleet.analysis.memory.live_ranges import (
    GIVEN,
    InnerPeaks,
    LiveRange,
    fused_ranges,
    live_ranges,
)
from jaxfleet.ir import Program

MOST_STAGES = 128  # planning time grows with its square

Bytes = NDArray[np.int64]


def cut_positions(crossing: Bytes, *, most: int = MOST_STAGES) -> list[int]:
    """Returns the positions of the first operators of stages, 0 among them.

    Up to `most` positions, all are taken. Otherwise a step is cut where fewer bytes cross than
    around it: layers that repeat have the same bytes, and so are cut at the same place. If these
    are still too many, they are thinned by the same rule, and finally by taking every n-th.
    `crossing` contains, by position, the bytes made before it and read at it or later.
    """
    found: Sequence[int] = range(1, len(crossing))
    if len(found) >= most:
        found = _one_of_each_run(crossing, _minima(crossing, found))
    while len(found) >= most:
        before, found = len(found), _minima(crossing, found)
        if len(found) == before:
            found = found[:: -(-before // (most - 1))]
    return [0, *found]


def _minima(crossing: Bytes, among: Sequence[int]) -> list[int]:
    """Returns the positions where no more bytes cross than at their neighbours."""
    found = []
    for place, position in enumerate(among):
        before = crossing[among[place - 1]] if place else np.inf
        after = crossing[among[place + 1]] if place + 1 < len(among) else np.inf
        if crossing[position] <= min(before, after):
            found.append(position)
    return found


def _one_of_each_run(crossing: Bytes, positions: Sequence[int]) -> list[int]:
    """Returns the last of each run of (nearly) adjacent positions with equal bytes."""
    found: list[int] = []
    for position in positions:
        is_near = found and position - found[-1] <= 2  # one operator between may add a little
        if is_near and crossing[position] == crossing[found[-1]]:
            found.pop()
        found.append(position)
    return found


_NEVER = np.iinfo(np.int64).max // 2


@dataclass(frozen=True)
class ExecutableCuts:
    """A step with all its possible cuts into executables."""

    places: tuple[int, ...]  # the place in block 0 of each piece's first operator
    # `[p, c]`, the bytes while pieces `p` to `c - 1` run as one executable: its inputs, its outputs
    # and all its temporaries
    held: Table = field(repr=False)

    @classmethod
    def of(
        cls, program: Program, sizes: Mapping[str, int], *, keep: Iterable[str] = ()
    ) -> "ExecutableCuts":
        """Returns the pieces of a program without cuts."""
        counted = TemporaryBytes(program, sizes, keep=keep)
        values, inner = live_ranges(program, counted), InnerPeaks(program, counted)
        count = len(program.root.ops)
        places = cut_positions(_crossing(values, count)) if count else []
        stage = np.searchsorted(places, np.arange(count), side="right") - 1
        between = IntervalSums(len(places), _spans(values, stage))
        both = zip(values, fused_ranges(program, values), strict=True)
        own = [*_spans([value for value, left in both if left.bytes], stage)]
        for place, op in enumerate(program.root.ops):
            own.append((int(stage[place]), int(stage[place]), inner.of(op.blocks)))
        inside = IntervalSums(len(places), own).inside()
        return cls(tuple(places), between.entering() + between.leaving() + inside)

    def least(self) -> int:
        """Returns the smallest peak of any choice of cuts."""
        best = np.full(len(self.places) + 1, _NEVER)
        best[0] = 0
        for end in range(1, len(best)):
            best[end] = np.maximum(best[:end], self.held[:end, end]).min()
        return int(best[-1])

    def cuts(self, budget: int) -> tuple[int, ...] | None:
        """Returns the places in block 0 where the fewest executables within a budget begin.

        The first executable is left out. None if no choice of cuts meets the budget.
        """
        count = len(self.places)
        fewest, back = np.full(count + 1, _NEVER), [0] * (count + 1)
        fewest[0] = 0
        for end in range(1, count + 1):
            ways = np.where(self.held[:end, end] <= budget, fewest[:end] + 1, _NEVER)
            back[end] = int(ways.argmin())
            fewest[end] = ways[back[end]]
        if fewest[-1] >= _NEVER:
            return None
        starts, end = [], back[count]
        while end:
            starts.append(self.places[end])
            end = back[end]
        return tuple(reversed(starts))


def _crossing(values: Sequence[LiveRange], count: int) -> Table:
    """Returns, by operator, the bytes made before it and read at it or later."""
    steps = np.zeros(count + 1, np.int64)
    for value in values:
        if value.made != GIVEN and value.last > value.made:
            steps[value.made + 1] += value.bytes
            steps[value.last + 1] -= value.bytes
    return steps.cumsum()[:-1]


def _spans(values: Sequence[LiveRange], stage: Table) -> Iterator[tuple[int, int, int]]:
    for value in values:
        if value.bytes and value.made != GIVEN:
            yield int(stage[value.made]), int(stage[value.last]), value.bytes

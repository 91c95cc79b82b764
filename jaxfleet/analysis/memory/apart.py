"""Where a step is cut into executables that compute each operator once, to hold less at once.

Inside one executable XLA:CPU runs what does not depend on each other side by side, and so may hold
all of it: four microbatches written out one after another take four times the memory of one. What
stands in several executables runs one after another.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.analysis.memory.chain import Table
from jaxfleet.analysis.memory.cuts import cut_positions
from jaxfleet.analysis.memory.liveness import GIVEN, InnerPeaks, Value, values_of
from jaxfleet.analysis.memory.merging import merged
from jaxfleet.analysis.memory.sizes import Counted
from jaxfleet.analysis.memory.tables import Sums
from jaxfleet.ir import Program

_NEVER = np.iinfo(np.int64).max // 2


@dataclass(frozen=True)
class Apart:
    """A step, cut wherever it may be cut.

    Attributes:
        places: the place in block 0 of each piece's first operator.
        held: `[p, c]`, the bytes while the pieces from `p` on, without `c`, run as one executable:
            what lies there, what it makes for others, and all that it makes for itself.
    """

    places: tuple[int, ...]
    held: Table = field(repr=False)

    @classmethod
    def of(cls, program: Program, sizes: Mapping[str, int], *, keep: Iterable[str] = ()) -> "Apart":
        """Returns the pieces of a program.

        Args:
            program: without cuts.
            sizes: a number for every letter.
            keep: variables that are fetched by name, so returned.

        Raises:
            PassError: a letter has no number.
        """
        counted = Counted(program, sizes, keep=keep)
        values, inner = values_of(program, counted), InnerPeaks(program, counted)
        count = len(program.root.ops)
        places = cut_positions(_crossing(values, count)) if count else []
        stage = np.searchsorted(places, np.arange(count), side="right") - 1
        between = Sums(len(places), _spans(values, stage))
        both = zip(values, merged(program, values), strict=True)
        own = [*_spans([value for value, left in both if left.bytes], stage)]
        for place, op in enumerate(program.root.ops):
            own.append((int(stage[place]), int(stage[place]), inner.of(op.blocks)))
        inside = Sums(len(places), own).inside()
        return cls(tuple(places), between.entering() + between.leaving() + inside)

    def least(self) -> int:
        """Returns the fewest bytes that any way to cut holds."""
        best = np.full(len(self.places) + 1, _NEVER)
        best[0] = 0
        for end in range(1, len(best)):
            best[end] = np.maximum(best[:end], self.held[:end, end]).min()
        return int(best[-1])

    def cuts(self, budget: int) -> tuple[int, ...] | None:
        """Returns where the fewest executables begin that hold no more, the first left out.

        Returns:
            Places in block 0; None where no way to cut holds so little.
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


def _crossing(values: Sequence[Value], count: int) -> Table:
    """Returns, by operator, the bytes that are made before it and read from it on."""
    steps = np.zeros(count + 1, np.int64)
    for value in values:
        if value.made != GIVEN and value.last > value.made:
            steps[value.made + 1] += value.bytes
            steps[value.last + 1] -= value.bytes
    return steps.cumsum()[:-1]


def _spans(values: Sequence[Value], stage: Table) -> Iterator[tuple[int, int, int]]:
    for value in values:
        if value.bytes and value.made != GIVEN:
            yield int(stage[value.made]), int(stage[value.last]), value.bytes

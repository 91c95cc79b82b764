"""The values and operators of a step, by the stage of its forward part that they belong to."""

from collections.abc import Sequence

import numpy as np

from jaxfleet.analysis.memory.liveness import Value
from jaxfleet.analysis.memory.merging import merged
from jaxfleet.analysis.memory.phases import Phases
from jaxfleet.ir import Program


class Staged:
    """A step, cut into stages.

    Attributes:
        program: it.
        made: forward's values, as the program has them.
        held: the same, as a compiler leaves them inside an executable.
        late: those of what follows forward, as the program has them.
        late_held: the same, as a compiler leaves them inside an executable.
    """

    def __init__(
        self, program: Program, values: Sequence[Value], phases: Phases, starts: Sequence[int]
    ) -> None:
        self.program = program
        self.ops = program.root.ops
        self.starts = [phases.forward[start] for start in starts]
        self.count = len(starts)
        self.made = [value for value in values if value.made in phases.position]
        after = merged(program, values)
        self.held = [value for value in after if value.made in phases.position]
        self.late = [value for value in values if value.made in phases.at]
        self.late_held = [value for value in after if value.made in phases.at]
        bounds = np.searchsorted(starts, np.arange(len(phases.forward)), side="right") - 1
        self._stage: list[int] = bounds.tolist()
        self.phases = phases

    def of(self, place: int) -> int:
        """Returns the stage of an operator, of what follows forward too."""
        position = self.phases.position
        return self._stage[position[place] if place in position else self.phases.at[place]]

    def late_order(self) -> list[int]:
        """Returns the operators behind forward, each right before the first that waits for it.

        A program may make all clipped gradients before the first update; nobody runs it so.
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
        """Tells whether a forward operator is in the last stage."""
        return self.of(place) == self.count - 1

    def last_forward(self, value: Value) -> int:
        """Returns the last stage that reads a forward value in forward."""
        return self._stage[self.phases.last_forward(value)]

    def late_span(self, value: Value) -> tuple[int, int, int]:
        """Returns where a value behind forward begins and ends, from the back, and its bytes."""
        last, begins, behind = self.count - 1, self.of(value.made), self.first_behind(value)
        return last - begins, last - (begins if behind is None else behind), value.bytes

    def first_behind(self, value: Value) -> int | None:
        """Returns the first stage with which anything that follows forward reads a value."""
        behind = [self.of(place) for place in value.reads if place not in self.phases.position]
        return min(behind, default=None)

"""Values and operators of a step by stage, and the gradients that reuse a donated buffer.

Lowering donates a temporary that an executable reads last to an output of the same type
(`lower.segmented`). That saves memory if the old value is read before the new one is written;
otherwise XLA copies it first.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from jaxfleet.analysis.memory.chain import Table
from jaxfleet.analysis.memory.fusion_model import fused_ranges, is_elementwise
from jaxfleet.analysis.memory.liveness import LiveRange
from jaxfleet.analysis.memory.ordering import ScheduleConstraints
from jaxfleet.ir import Program


class StagedStep:
    """A step, cut into stages.

    Attributes:
        made: the forward values, as the program has them.
        held: the same, as a compiler leaves them inside an executable.
        late: the values made after forward, as the program has them.
        late_held: the same, as a compiler leaves them inside an executable.
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

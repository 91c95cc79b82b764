"""Gradients that leave a group in the memory of one that came in: it is donated to them.

Lowering gives a temporary that a part reads last to one of its own type that the part makes
(`lower.segmented`). That saves memory where the old one was read before the new one is written;
else XLA copies it first.
"""

from collections import defaultdict

import numpy as np

from jaxfleet.analysis.memory.chain import Table
from jaxfleet.analysis.memory.merging import goes_by_element
from jaxfleet.analysis.memory.staged import Staged


def handed_on(stages: Staged) -> Table:
    """Returns `[p, c]`: the bytes that come in and go out as one, at most one value of each type.

    Stages are counted from the back, as backward goes through them.
    """
    count = stages.count
    by_type: dict[str, Handed] = defaultdict(lambda: Handed(count))
    size_of = dict[str, int]()
    for value in stages.late:
        begins, ends, size = stages.late_span(value)
        if size and begins < ends:
            kind = stages.program.lookup(value.name).type
            in_place = goes_by_element(stages.ops[value.made].type)
            by_type[kind].add(begins, ends, in_place=in_place)
            size_of[kind] = size
    found = np.zeros((count + 1, count + 1), np.int64)
    for kind, spans in by_type.items():
        found += size_of[kind] * spans.pairs()
    return found


class Handed:
    """Where values of one type begin and end."""

    def __init__(self, count: int) -> None:
        self._enters = np.zeros((count, count + 1), np.int64)  # [last stage that reads it, p]
        self._leaves = np.zeros((count, count + 1), np.int64)  # [stage, c]: made there or behind

    def add(self, begins: int, ends: int, *, in_place: bool) -> None:
        """Adds a value.

        Args:
            begins: the stage that makes it.
            ends: the last stage that reads it.
            in_place: it may be written over what it is made of.
        """
        self._enters[ends, begins + 1 : ends + 1] = 1
        self._leaves[: begins + in_place, begins + 1 : ends + 1] = 1

    def pairs(self) -> Table:
        """Returns `[p, c]`: whether one that comes in is read before one that goes out is made."""
        found: Table = (self._enters.T @ self._leaves > 0).astype(np.int64)
        return found

"""A training step as a chain of stages, and what each way to group them costs and holds.

Between any two cuts lies a group. Its numbers depend on where it begins and ends, and on nothing
else of the plan, so they are tables: `[p, c]` is the group of the stages from `p` on, without `c`.
A value is counted once, however many cuts it crosses: at the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from jaxfleet.analysis.memory.forward import Forward, Need
from jaxfleet.errors import PassError

Table = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """Where a step's forward part is cut, and what is kept for its backward part.

    What crosses a cut is kept until nothing reads it any more.

    Attributes:
        cuts: places in block 0 of the first operator of each group but the first.
        kept: by group, whether it keeps all that backward reads of it. The last group does: its
            backward follows at once.
        saved: what the other groups keep; what they do not keep runs again.
    """

    cuts: tuple[int, ...] = ()
    kept: tuple[bool, ...] = (True,)
    saved: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Level:
    """One choice of what a group keeps besides what crosses cuts: the same rule for all groups.

    Attributes:
        stored: forward values, by number, that are kept where they are needed.
        again: `[p, c]`, the cost of running again what is needed and not kept.
        saved: `[p, c]`, the bytes that are kept.
        work: `[p, c]`, the temporary bytes while the group runs forward.
        held: `[p, c]`, the most bytes while the group runs forward or backward, without what
            groups before it keep.
    """

    stored: frozenset[int] = field(repr=False)
    again: Table = field(repr=False)
    saved: Table = field(repr=False)
    work: Table = field(repr=False)
    held: Table = field(repr=False)


@dataclass(frozen=True)
class Group:
    """Stages that run together, and what is kept of them.

    Attributes:
        first: the first stage.
        end: the stage behind the last.
        stored: forward values, by number, that it keeps where they are needed.
    """

    first: int
    end: int
    stored: frozenset[int]


@dataclass(frozen=True)
class Chain:
    """A step, cut wherever it may be cut.

    Attributes:
        places: the place in block 0 of each stage's first operator.
        levels: what groups may keep, from nothing to all that backward reads.
        crossing: `[p, c]`, the bytes that the group makes and stages behind it read.
        backward: `[p, c]`, the bytes while its backward runs, without what groups before it keep.
        forward: the forward part.
    """

    places: tuple[int, ...]
    levels: tuple[Level, ...]
    crossing: Table = field(repr=False)
    backward: Table = field(repr=False)
    forward: Forward = field(repr=False)

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.places)

    def need(self, group: Group) -> Need:
        """Returns what a group must run again, and what it keeps."""
        need = Need(self.forward, group.first, group.stored)
        for _ in range(group.first, group.end):
            need.add_stage()
        return need

    def held(self, group: Group, saved_bytes: int) -> int:
        """Returns the most bytes while a group runs, without what groups before it keep."""
        at = group.first, group.end
        level = self.levels[-1 if group.stored >= self.levels[-1].stored else 0]
        return int(max(self.crossing[at] + saved_bytes + level.work[at], self.backward[at]))

    def plan(self, groups: Sequence[Group]) -> Plan:
        """Returns a plan in the program's terms."""
        values, saved = self.forward.values, set[str]()
        for group in groups[:-1]:
            saved.update(values[number].name for number in self.need(group).saved)
        cuts = tuple(self.places[group.first] for group in groups[1:])
        return Plan(cuts, (False,) * len(cuts) + (True,), frozenset(saved))

    def groups(self, plan: Plan) -> list[Group]:
        """Returns the groups of a plan.

        Raises:
            PassError: the plan is not one of this chain.
        """
        bounds = [0, *(self._stage(place) for place in plan.cuts), self.stages]
        if bounds != sorted(set(bounds)) or len(plan.kept) != len(bounds) - 1:
            raise PassError(f"cuts {plan.cuts} and kept {plan.kept} are not groups in order")
        values = enumerate(self.forward.values)
        saved = frozenset(number for number, span in values if span.name in plan.saved)
        return [
            Group(first, end, self.levels[-1].stored if keep else saved)
            for (first, end), keep in zip(pairwise(bounds), plan.kept, strict=True)
        ]

    def _stage(self, place: int) -> int:
        if place not in self.places:
            raise PassError(f"operator {place} is not the first of a stage", hint="plan again")
        return self.places.index(place)

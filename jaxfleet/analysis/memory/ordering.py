"""Scheduling constraints of a step whose forward part is cut into groups.

Backward visits the groups from the last to the first. An operator after forward can run with a
group once the values of that group and of all later groups are available: its operands determine
the earliest group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxfleet.analysis.flow import forward_places
from jaxfleet.analysis.memory.live_ranges import GIVEN, LiveRange, live_ranges
from jaxfleet.ir import Program, Role

_LATE = frozenset({Role.BACKWARD, Role.BACKWARD_LOSS, Role.OPTIMIZE})


@dataclass(frozen=True)
class ScheduleConstraints:
    """The order of block 0's operators relative to its forward part."""

    # the places of the forward operators, in order. A position is an index here
    forward: tuple[int, ...]
    # every other operator's place, with the position of a forward operator: both run with the same
    # group
    at: Mapping[int, int]

    @cached_property
    def position(self) -> Mapping[int, int]:
        """The position of each forward operator, by place."""
        return {place: index for index, place in enumerate(self.forward)}

    def last_forward(self, value: LiveRange) -> int:
        """Returns the position of the last forward operator that makes or reads a value."""
        return _last_forward(self.position, value)


def _last_forward(position: Mapping[int, int], value: LiveRange) -> int:
    return max(position[x] for x in (value.made, *value.reads) if x in position)


def schedule_constraints(
    program: Program, values: Sequence[LiveRange] | None = None
) -> ScheduleConstraints:
    """Returns the forward operators of a step, and the positions of the others.

    An operator's position is the first of the positions of its operands. A forward value is
    available from its last forward reader on: a cut before that one keeps it. Old parameters and
    state are overwritten only once no earlier group reads them. Operators that depend on no
    gradient run right before their first reader.
    """
    values = live_ranges(program) if values is None else values
    ops = program.root.ops
    makers, reads = _makers(values, len(ops))
    forward = sorted(forward_places(program))
    position = {place: index for index, place in enumerate(forward)}
    by_name: dict[str, list[int]] = {}
    for number, value in enumerate(values):
        by_name.setdefault(value.name, []).append(number)
    walk = _Walk(program, values, makers, reads, position, by_name)
    return ScheduleConstraints(tuple(forward), walk.positions())


def _makers(values: Sequence[LiveRange], count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the numbers of the values that each operator makes, and of those that it reads."""
    makes: list[list[int]] = [[] for _ in range(count)]
    reads: list[list[int]] = [[] for _ in range(count)]
    for number, value in enumerate(values):
        if value.made != GIVEN:
            makes[value.made].append(number)
        for place in value.reads:
            reads[place].append(number)
    return makes, reads


@dataclass
class _Walk:
    program: Program
    values: Sequence[LiveRange]
    makes: Sequence[Sequence[int]]
    reads: Sequence[Sequence[int]]
    position: Mapping[int, int]  # of forward operators
    by_name: Mapping[str, Sequence[int]]

    def positions(self) -> dict[int, int]:
        """Returns the positions of all operators outside forward."""
        late = [place for place in range(len(self.makes)) if place not in self.position]
        anchored = self._anchored(late)
        found: dict[int, int] = {}
        before = None
        while found != before:  # a postponed operator may postpone those that it depends on
            before = dict(found)
            for place in late:
                if place in anchored or before == {}:
                    found[place] = self._soonest(place, found)
            for place in reversed(late):
                if place not in anchored:
                    readers = [found[at] for at in self._late_readers(place)]
                    found[place] = max(readers, default=found[place])
        return found

    def _anchored(self, late: Sequence[int]) -> set[int]:
        """Returns the places of operators that depend on a gradient or on a forward value."""
        ops, found = self.program.root.ops, set[int]()
        for place in late:
            sources = [self.values[number].made for number in self.reads[place]]
            is_late = ops[place].role in _LATE
            if any(x in found or (is_late and x in self.position) for x in sources):
                found.add(place)
        return found

    def _late_readers(self, place: int) -> list[int]:
        readers = [at for number in self.makes[place] for at in self.values[number].reads]
        return [at for at in readers if at not in self.position]

    def _soonest(self, place: int, found: Mapping[int, int]) -> int:
        limits = [len(self.position) - 1]
        for number in self.reads[place]:
            value = self.values[number]
            if value.made in self.position:
                limits.append(_last_forward(self.position, value))
            elif value.made != GIVEN:
                limits.append(found[value.made])
        for number in self.makes[place]:
            limits += self._old_readers(number, found)
        return min(limits)

    def _old_readers(self, number: int, found: Mapping[int, int]) -> list[int]:
        """Returns the positions of the readers of a parameter or state before it is written."""
        name = self.values[number].name
        if not self.program.lookup(name).kind.persistable:
            return []
        return [
            self.position[at] if at in self.position else found[at]
            for old in self.by_name[name]
            if self.values[old].made < self.values[number].made
            for at in self.values[old].reads
            if at != self.values[number].made
        ]

"""Where the operators of a training step may run once its forward part is cut into groups.

Backward goes through the groups from the last to the first. An operator behind forward can run
with a group when the group's values are there, and those of every group behind it: what it reads
says how far back that is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxfleet.analysis.forward_part import forward_places
from jaxfleet.analysis.memory.liveness import GIVEN, Value, values_of
from jaxfleet.ir import Program, Role

_LATE = frozenset({Role.BACKWARD, Role.BACKWARD_LOSS, Role.OPTIMIZE})


@dataclass(frozen=True)
class Phases:
    """How the operators of block 0 follow its forward part.

    Attributes:
        forward: the places of the forward operators, in order. A position is an index here.
        at: every other operator's place, with its position: it runs with the group that this
            forward operator is in.
    """

    forward: tuple[int, ...]
    at: Mapping[int, int]

    @cached_property
    def position(self) -> Mapping[int, int]:
        """The position of each forward operator's place."""
        return {place: index for index, place in enumerate(self.forward)}

    def last_forward(self, value: Value) -> int:
        """Returns the position of the last forward operator that makes or reads a value."""
        return max(self.position[x] for x in (value.made, *value.reads) if x in self.position)


def phases_of(program: Program, values: Sequence[Value] | None = None) -> Phases:
    """Returns the forward operators of a step, and the positions of the others.

    An operator's position is the first of those of what it reads. A forward value is there from
    its last forward reader on: a cut before that one keeps it. Old parameters and state are
    written over only where no group further back reads them again. What depends on no gradient
    runs right before it is read.

    Args:
        program: a training step with roles.
        values: those of its block 0, where they are at hand.
    """
    values = values_of(program) if values is None else values
    ops = program.root.ops
    makers, reads = _makers(values, len(ops))
    forward = sorted(forward_places(program))
    position = {place: index for index, place in enumerate(forward)}
    by_name: dict[str, list[int]] = {}
    for number, value in enumerate(values):
        by_name.setdefault(value.name, []).append(number)
    walk = _Walk(program, values, makers, reads, position, by_name)
    return Phases(tuple(forward), walk.positions())


def _makers(values: Sequence[Value], count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the values, by their numbers, that each operator makes, and that it reads."""
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
    values: Sequence[Value]
    makes: Sequence[Sequence[int]]
    reads: Sequence[Sequence[int]]
    position: Mapping[int, int]  # of forward operators
    by_name: Mapping[str, Sequence[int]]

    def positions(self) -> dict[int, int]:
        """Returns the positions of all operators that are not forward's."""
        late = [place for place in range(len(self.makes)) if place not in self.position]
        anchored = self._anchored(late)
        found: dict[int, int] = {}
        before = None
        while found != before:  # what runs later may be what something else waits for
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
        """Returns the places of what depends on a gradient, or is made of forward's values."""
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
                limits.append(self._last_forward(value))
            elif value.made != GIVEN:
                limits.append(found[value.made])
        for number in self.makes[place]:
            limits += self._old_readers(number, found)
        return min(limits)

    def _last_forward(self, value: Value) -> int:
        return max(self.position[x] for x in (value.made, *value.reads) if x in self.position)

    def _old_readers(self, number: int, found: Mapping[int, int]) -> list[int]:
        """Returns the positions of what reads a parameter or state before it is written."""
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

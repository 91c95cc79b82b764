"""When each operator of a step in groups runs: forward by groups, then backward from the last."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.ir import Kind, Operator
from jaxfleet.passes._effects import Effects
from jaxfleet.passes._groups_of_forward import ForwardGroups


@dataclass
class Times:
    """Gives each operator that is not forward the time of a group, as early as it pays.

    Time `g` is the forward of group `g`; its backward comes as much after the last group's forward
    as that comes after its own. An operator waits for what it reads, for the readers of what it
    overwrites, and, if it acts on the world, for those that do so before it. One that reads a kept
    value of forward waits for the backward of the last group that reads it too: it could run
    before, but what it makes would lie there until then (`analysis.memory.phases` counts on it).

    Attributes:
        groups: how forward is divided.
        of: the times, by place.
    """

    groups: ForwardGroups
    of: dict[int, int] = field(default_factory=dict)
    _written: dict[str, int] = field(default_factory=dict)
    _used: dict[str, int] = field(default_factory=dict)
    _acted: int = 0
    _little: set[str] = field(default_factory=set)  # what is made of what is there anyway
    _effects: Effects = field(default_factory=Effects)

    def backward(self, group: int) -> int:
        """Returns the time of a group's backward."""
        return 2 * (self.groups.count - 1) - group

    def find(self) -> Mapping[int, int]:
        """Returns the time of every operator that is not forward, by its place."""
        for place, op in enumerate(self.groups.program.root.ops):
            if place in self.groups.forward:
                self._forward(place)
            elif op.type == "fetch":
                self.of[place] = self.backward(0)
            else:
                self._later(place, op, acts=self._effects.has_effect(op))
        self._sink()
        return self.of

    def _forward(self, place: int) -> None:
        groups = self.groups
        group, used = groups.group(place), groups.uses.of(groups.program.root.ops[place])
        runs_again = place in groups.again[group].places
        for name in used.writes:
            again = name in groups.again[group].names
            self._written[name] = self.backward(group) if again else group
        last = self.backward(group) if runs_again else group
        for name in used.reads:
            self._used[name] = max(self._used.get(name, 0), last)
            if name in groups.saved:
                self._written[name] = self.backward(group)

    def _later(self, place: int, op: Operator, *, acts: bool) -> None:
        used = self.groups.uses.of(op)
        waits = [self._written.get(name, 0) for name in used.reads]
        waits += [max(self._written.get(x, 0), self._used.get(x, 0)) for x in used.writes]
        time = max([*waits, self._acted if acts else 0])
        self._note(place, time, used.reads, used.writes)
        if acts:
            self._acted = time
        elif self.is_light(op):
            self._little.update(used.writes)

    def _note(self, place: int, time: int, reads: Iterable[str], writes: Iterable[str]) -> None:
        self.of[place] = time
        for name in reads:
            self._used[name] = max(self._used.get(name, 0), time)
        for name in writes:
            self._written[name] = time

    def _sink(self) -> None:
        """Moves what needs nothing but what is there anyway to where it is first read."""
        ops = self.groups.program.root.ops
        first: dict[str, int] = {}
        written: dict[str, int] = {}
        for place in sorted(self.of, reverse=True):
            op, used = ops[place], self.groups.uses.of(ops[place])
            later = [first[name] for name in used.writes if name in first]
            bound = min([*later, *(written[x] for x in used.reads if x in written)], default=0)
            if later and self.is_light(op):
                self.of[place] = max(self.of[place], bound)
            for name in used.reads:
                first[name] = min(first.get(name, self.of[place]), self.of[place])
            for name in used.writes:
                first.pop(name, None)
                written[name] = self.of[place]

    def is_light(self, op: Operator) -> bool:
        """Tells whether all that an operator reads is a scalar, there anyway, or made of such."""
        reads = self.groups.uses.of(op).reads
        return all(map(self._is_there, reads)) and not self._effects.has_effect(op)

    def _is_there(self, name: str) -> bool:
        variable = self.groups.program.lookup(name)
        return variable.shape == () or variable.kind is not Kind.TEMP or name in self._little


def in_order(times: Mapping[int, int], count: int) -> Sequence[Sequence[int]]:
    """Returns the places of operators by their times, in the order of the program in each."""
    found: list[list[int]] = [[] for _ in range(count)]
    for place in sorted(times):
        found[times[place]].append(place)
    return found

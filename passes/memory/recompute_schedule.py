"""Forward in groups: their kept and recomputed values, and the schedule of operators.

Updates that wait for all gradients run in chunks, so that their temporaries do not add up.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property

from jaxfleet.analysis.flow import Effects, OuterUses, forward_places
from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Operator, Program, Role


@dataclass
class Recomputation:
    """The recomputation of one group: the indices of its operators, and their outputs."""

    places: tuple[int, ...]
    names: AbstractSet[str]


@dataclass(frozen=True)
class ForwardGroups:
    """A program's forward operators in groups."""

    program: Program  # its forward operators overwrite no state
    cuts: tuple[int, ...]  # the index of the first operator of each group but the first
    kept: tuple[bool, ...]  # for each group, whether its values for backward are kept
    also: AbstractSet[str] = frozenset()  # values that the other groups keep too

    @property
    def count(self) -> int:
        return len(self.kept)

    @cached_property
    def uses(self) -> OuterUses:
        return OuterUses(self.program)

    @cached_property
    def forward(self) -> AbstractSet[int]:
        """The indices of the operators of forward, and of their dependencies."""
        return forward_places(self.program)

    def group(self, place: int) -> int:
        return bisect_right(self.cuts, place)

    @cached_property
    def maker(self) -> dict[str, int]:
        """The index of the operator of forward that makes each temporary, which is written once."""
        found: dict[str, int] = {}
        for place in sorted(self.forward):
            op = self.program.root.ops[place]
            for name in self.uses.of(op).writes:
                if name in found:
                    what = f"recompute: '{name}' is written twice in forward"
                    hint = "give the second value a variable of its own, or recompute nothing"
                    raise PassError(what, op=op, hint=hint)
                found[name] = place
        return found

    @cached_property
    def again(self) -> tuple[Recomputation, ...]:
        """The recomputation of each group; empty if it is kept."""
        return self._decided[0]

    @cached_property
    def saved(self) -> AbstractSet[str]:
        """Values of forward that backward or a recomputation reads."""
        return self._decided[1]

    @cached_property
    def once(self) -> tuple[int, ...]:
        """The operators of forward that run in forward; the others only run in recomputation."""
        effects, needed, found = Effects(), set(self.saved), list[int]()
        ops = self.program.root.ops
        states = {v.name for v in self.program.variables.values() if v.kind.persistable}
        for place in sorted(self.forward, reverse=True):
            used = self.uses.of(ops[place])
            writes = used.writes & (needed | states)
            if writes or effects.has_effect(ops[place]):
                found.append(place)
                needed.update(used.reads)
        return tuple(reversed(found))

    @cached_property
    def _decided(self) -> tuple[tuple[Recomputation, ...], AbstractSet[str]]:
        wanted = self._read_later()
        saved = self._never_again() | (wanted & self._crossing()) | (self.also & self.maker.keys())
        found: list[Recomputation] = []
        for group in reversed(range(self.count)):
            mine = {name for name in wanted if self.group(self.maker[name]) == group}
            if self.kept[group]:
                saved |= mine
                found.append(Recomputation((), frozenset()))
            else:
                found.append(self._again(group, mine - saved, saved))
        return tuple(reversed(found)), saved

    def _again(self, group: int, wanted: set[str], saved: set[str]) -> Recomputation:
        """Returns the recomputation of the wanted values; adds its inputs to `saved`."""
        places, needed = list[int](), set(wanted)
        ops = self.program.root.ops
        for place in sorted(self.forward, reverse=True):
            if self.group(place) != group:
                continue
            op = ops[place]
            if needed.isdisjoint(op.writes):
                continue
            places.append(place)
            for name in self._made_by_forward(self.uses.of(op).reads):
                if self.group(self.maker[name]) == group and name not in saved:
                    needed.add(name)
                else:
                    saved.add(name)
        names = {name for place in places for name in ops[place].writes} - saved
        return Recomputation(tuple(reversed(places)), names)

    def _read_later(self) -> set[str]:
        """Returns values of forward that later operators read."""
        ops = self.program.root.ops
        later = (op for place, op in enumerate(ops) if place not in self.forward)
        return {name for op in later for name in self._made_by_forward(self.uses.of(op).reads)}

    def _crossing(self) -> set[str]:
        """Returns the inputs of later groups, whose backward also reads them, and runs first."""
        ops = self.program.root.ops
        return {
            name
            for place in self.forward
            for name in self._made_by_forward(self.uses.of(ops[place]).reads)
            if self.group(self.maker[name]) < self.group(place)
        }

    def _never_again(self) -> set[str]:
        """Returns values that cannot be recomputed: fetched, or made by an effect."""
        effects, found = Effects(), set[str]()
        for place, op in enumerate(self.program.root.ops):
            if effects.has_effect(op):
                names = op.writes if place in self.forward else op.reads
                found.update(self._made_by_forward(names))
        return found

    def _made_by_forward(self, names: AbstractSet[str] | Sequence[str]) -> set[str]:
        return {name for name in names if name in self.maker}


@dataclass
class RecomputeSchedule:
    """Assigns each operator outside of forward to the time of a group, as early as it pays.

    Time `g` is the forward of group `g`; its backward comes as much after the last group's forward
    as that comes after its own. An operator waits for its inputs, for the readers of values that it
    overwrites, and, if it has side effects, for earlier operators with side effects. One that reads
    a kept value of forward also waits for the backward of the last group that reads it: it could
    run earlier, but its output would occupy memory until then (`analysis.memory.ordering` relies on
    it).
    """

    groups: ForwardGroups
    of: dict[int, int] = field(default_factory=dict)  # the times, by index
    _written: dict[str, int] = field(default_factory=dict)
    _used: dict[str, int] = field(default_factory=dict)
    _acted: int = 0
    _little: set[str] = field(default_factory=set)  # values made of always-available ones
    _effects: Effects = field(default_factory=Effects)

    def backward(self, group: int) -> int:
        return 2 * (self.groups.count - 1) - group

    def find(self) -> Mapping[int, int]:
        """Returns the time of every operator outside of forward, by its index."""
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
        """Moves operators that need only always-available values to their first reader."""
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
        """Whether all inputs of an operator are scalars, always available, or made of such."""
        reads = self.groups.uses.of(op).reads
        return all(map(self._is_there, reads)) and not self._effects.has_effect(op)

    def _is_there(self, name: str) -> bool:
        variable = self.groups.program.lookup(name)
        return variable.shape == () or variable.kind is not Kind.TEMP or name in self._little


def by_time(times: Mapping[int, int], count: int) -> Sequence[Sequence[int]]:
    """Returns the indices of operators by their times, in program order within each."""
    found: list[list[int]] = [[] for _ in range(count)]
    for place in sorted(times):
        found[times[place]].append(place)
    return found


_CHUNKS = 8  # approximate number of executables; more take less memory and more time


@dataclass
class UpdateChunks:
    """Divides the operators that run last."""

    program: Program
    uses: OuterUses
    places: Sequence[int]  # the indices of those operators, in order
    early: frozenset[str]  # temporaries that were made before them
    # those of the operators that need only always-available values: `0.9*mu`
    light: frozenset[int] = frozenset()
    _chain: dict[str, int] = field(default_factory=dict)  # the number of a name's chain
    _parent: list[int] = field(default_factory=list)

    def all(self) -> list[list[int]]:
        """Returns backward, then operators shared by chains of updates, then chunks of chains."""
        waiting = set(self._late())
        if not waiting:
            return [list(self.places)]
        waiting |= self._read_by(waiting)
        late = sorted(waiting)
        backward = [place for place in self.places if place not in waiting]
        shared = self._shared(late)
        rest = [place for place in late if place not in shared]
        last = [place for place in rest if self._op(place).type == "fetch"]
        chunks = self._joined(self._chains([place for place in rest if place not in last]))
        chunks[-1] += last
        return [part for part in (backward, sorted(shared), *chunks) if part]

    def _op(self, place: int) -> Operator:
        return self.program.root.ops[place]

    def _late(self) -> list[int]:
        """Returns the operators that waited: updates by older gradients, and their dependents."""
        found, moved, waits = list[int](), set[str](), False
        for place in self.places:
            op, used = self._op(place), self.uses.of(self._op(place))
            waited = op.role is Role.OPTIMIZE and not self.early.isdisjoint(used.reads)
            waits = waits or waited
            if waited or op.type == "fetch" or not moved.isdisjoint(used.reads | used.writes):
                found.append(place)
                moved |= used.writes
        return found if waits else []

    def _read_by(self, waiting: AbstractSet[int]) -> set[int]:
        """Returns light operators that only waiting operators read."""
        found, read, written = set[int](), set[str](), set[str]()
        for place in reversed(self.places):
            used = self.uses.of(self._op(place))
            if place in waiting:
                continue
            is_free = read.isdisjoint(used.writes) and written.isdisjoint(used.reads)
            if place in self.light and is_free and used.writes.isdisjoint(self._states):
                found.add(place)
            else:
                read |= used.reads
                written |= used.writes
        return found

    def _shared(self, late: Sequence[int]) -> set[int]:
        """Returns the operators that make the scalars that all updates read: a norm, a rate."""
        found, unknown, read = set[int](), set[str](), set[str]()
        for place in late:
            used = self.uses.of(self._op(place))
            small = all(self.program.lookup(name).shape == () for name in used.writes)
            is_free = unknown.isdisjoint(used.reads) and read.isdisjoint(used.writes)
            if used.writes and small and is_free:
                found.add(place)
            else:
                unknown |= used.writes
                read |= used.reads
        return found

    def _chains(self, places: Sequence[int]) -> list[list[int]]:
        """Returns the operators in chains, independent of each other's writes."""
        at = dict[int, int]()
        for place in places:
            used = self.uses.of(self._op(place))
            mine = {
                self._root(self._chain[n]) for n in used.reads | used.writes if n in self._chain
            }
            chain = min(mine, default=len(self._parent))
            if not mine:
                self._parent.append(chain)
            for other in mine:
                self._parent[other] = chain
            for name in (*used.writes, *(n for n in used.reads if n in self._states)):
                self._chain[name] = chain
            at[place] = chain
        found: dict[int, list[int]] = {}
        for place, chain in at.items():
            found.setdefault(self._root(chain), []).append(place)
        return list(found.values())

    @property
    def _states(self) -> Mapping[str, object]:
        """Variables that are written in place, so their readers belong with their writers."""
        return {name: v for name, v in self.program.variables.items() if v.kind.persistable}

    def _root(self, chain: int) -> int:
        while self._parent[chain] != chain:
            chain = self._parent[chain]
        return chain

    def _joined(self, chains: Sequence[list[int]]) -> list[list[int]]:
        size = max(1, -(-len(chains) // _CHUNKS))
        groups = (chains[first : first + size] for first in range(0, len(chains), size))
        return [sorted(itertools.chain.from_iterable(group)) for group in groups] or [[]]

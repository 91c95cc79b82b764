"""Forward in groups: what each keeps for backward, and what it computes again."""

from bisect import bisect_right
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property

from jaxfleet.analysis.forward_part import forward_places
from jaxfleet.analysis.uses import OuterUses
from jaxfleet.errors import PassError
from jaxfleet.ir import Program
from jaxfleet.passes._effects import Effects


@dataclass
class Again:
    """What one group computes again, and for whom.

    Attributes:
        places: of the operators, in order.
        names: what they make.
    """

    places: tuple[int, ...]
    names: AbstractSet[str]


@dataclass(frozen=True)
class ForwardGroups:
    """A program's forward operators in groups.

    Attributes:
        program: its forward operators overwrite no state.
        cuts: the place of the first operator of each group but the first.
        kept: for each group, whether what backward reads of it is kept.
        also: what the other groups keep too.
    """

    program: Program
    cuts: tuple[int, ...]
    kept: tuple[bool, ...]
    also: AbstractSet[str] = frozenset()

    @property
    def count(self) -> int:
        """How many groups there are."""
        return len(self.kept)

    @cached_property
    def uses(self) -> OuterUses:
        """What each operator uses, sub-blocks included."""
        return OuterUses(self.program)

    @cached_property
    def forward(self) -> AbstractSet[int]:
        """The places of the operators of forward, and of those that they need."""
        return forward_places(self.program)

    def group(self, place: int) -> int:
        """Returns the group that an operator of forward is in."""
        return bisect_right(self.cuts, place)

    @cached_property
    def maker(self) -> dict[str, int]:
        """The place of the operator of forward that makes each temporary.

        Raises:
            PassError: a temporary is written twice.
        """
        found: dict[str, int] = {}
        for place in sorted(self.forward):
            op = self.program.root.ops[place]
            for name in self.uses.of(op).writes:
                if name in found:
                    what = f"recompute: '{name}' is written twice in forward"
                    raise PassError(what, op=op)
                found[name] = place
        return found

    @cached_property
    def again(self) -> tuple[Again, ...]:
        """What each group computes again; nothing, where it is kept."""
        return self._decided[0]

    @cached_property
    def saved(self) -> AbstractSet[str]:
        """What forward makes and backward reads, or a group that computes again."""
        return self._decided[1]

    @cached_property
    def once(self) -> tuple[int, ...]:
        """The operators of forward that run in forward; the others only run again."""
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
    def _decided(self) -> tuple[tuple[Again, ...], AbstractSet[str]]:
        wanted = self._read_later()
        saved = self._never_again() | (wanted & self._crossing()) | (self.also & self.maker.keys())
        found: list[Again] = []
        for group in reversed(range(self.count)):
            mine = {name for name in wanted if self.group(self.maker[name]) == group}
            if self.kept[group]:
                saved |= mine
                found.append(Again((), frozenset()))
            else:
                found.append(self._again(group, mine - saved, saved))
        return tuple(reversed(found)), saved

    def _again(self, group: int, wanted: set[str], saved: set[str]) -> Again:
        """Returns what makes the wanted values again; adds to `saved` what it begins with."""
        places, needed = list[int](), set(wanted)
        ops = self.program.root.ops
        for place in self._places(group):
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
        return Again(tuple(reversed(places)), names)

    def _places(self, group: int) -> Sequence[int]:
        return [place for place in sorted(self.forward, reverse=True) if self.group(place) == group]

    def _read_later(self) -> set[str]:
        """Returns what operators after forward read of it."""
        ops = self.program.root.ops
        later = (op for place, op in enumerate(ops) if place not in self.forward)
        return {name for op in later for name in self._made_by_forward(self.uses.of(op).reads)}

    def _crossing(self) -> set[str]:
        """Returns what a later group reads: its backward reads it too, and comes first."""
        ops = self.program.root.ops
        return {
            name
            for place in self.forward
            for name in self._made_by_forward(self.uses.of(ops[place]).reads)
            if self.group(self.maker[name]) < self.group(place)
        }

    def _never_again(self) -> set[str]:
        """Returns what is not to be computed again: what is fetched, or made by an effect."""
        effects, found = Effects(), set[str]()
        for place, op in enumerate(self.program.root.ops):
            if effects.has_effect(op):
                names = op.writes if place in self.forward else op.reads
                found.update(self._made_by_forward(names))
        return found

    def _made_by_forward(self, names: AbstractSet[str] | Sequence[str]) -> set[str]:
        return {name for name in names if name in self.maker}

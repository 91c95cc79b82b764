"""Which operators of block 0 must run before which, whatever order the others take."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from jaxfleet.analysis.uses import OuterUses
from jaxfleet.ir import Program
from jaxfleet.passes._effects import Effects


@dataclass
class MustFollow:
    """The order that block 0 depends on.

    An operator waits for who made what it reads, for all that read or wrote before what it
    writes, sub-blocks included; if it acts on the world or all devices run it together, for those
    that do so before it. Nothing passes a `cut`.

    Attributes:
        after: by place, the places of the operators that must run after it.
        before: by place, those that must run before it.
        acting: the places of those that act on the world.
    """

    after: Sequence[set[int]]
    before: Sequence[set[int]]
    acting: AbstractSet[int]

    @classmethod
    def of(cls, program: Program) -> "MustFollow":
        """Reads it off a program."""
        walk = _Walk(program)
        for place in range(len(program.root.ops)):
            walk.visit(place)
        return cls(_turned(walk.before), walk.before, walk.acting)

    def turned(self) -> "MustFollow":
        """Returns the same, for who goes from the last operator to the first."""
        return MustFollow(self.before, self.after, self.acting)

    def without(self, light: AbstractSet[int]) -> "MustFollow":
        """Returns the order that the other operators depend on, once some are left out."""
        before: list[set[int]] = []
        for places in self.before:
            before.append({x for p in places for x in (before[p] if p in light else {p})})
        others = [set() if place in light else x for place, x in enumerate(before)]
        return MustFollow(_turned(others), others, self.acting)

    def with_light(self, order: Sequence[int], light: AbstractSet[int]) -> list[int]:
        """Returns an order of the others with those that were left out, each as late as it may."""
        found: list[int] = []
        done = set[int]()
        for place in (*order, *sorted(light)):
            waiting, new = [place], set[int]()
            while waiting:
                at = waiting.pop()
                if at not in done and at not in new:
                    new.add(at)
                    waiting += self.before[at] & light
            found += sorted(new - {place}) + [place] * (place in new)
            done |= new
        return found


def _turned(before: Sequence[AbstractSet[int]]) -> list[set[int]]:
    after: list[set[int]] = [set() for _ in before]
    for place, places in enumerate(before):
        for earlier in places:
            after[earlier].add(place)
    return after


@dataclass
class _Walk:
    program: Program
    before: list[set[int]] = field(default_factory=list)
    acting: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._uses, self._effects = OuterUses(self.program), Effects()
        self._written: dict[str, int] = {}
        self._readers: dict[str, list[int]] = {}
        self._acted: int | None = None
        self._cut: int | None = None
        self._since: list[int] = []  # places behind the last cut

    def visit(self, place: int) -> None:
        """Notes what an operator must follow."""
        op = self.program.root.ops[place]
        used = self._uses.of(op)
        # What `delete_var` is given is gone behind it.
        writes = used.reads | used.writes if op.type == "delete_var" else used.writes
        found = {self._written[name] for name in used.reads | writes if name in self._written}
        found.update(reader for name in writes for reader in self._readers.get(name, ()))
        if self._effects.has_effect(op) or self._effects.is_collective(op):
            self.acting.add(place)
            found.update(() if self._acted is None else (self._acted,))
            self._acted = place
        found.update(() if self._cut is None else (self._cut,))
        if op.type == "cut":
            found.update(self._since)
            self._cut, self._since = place, []
        else:
            self._since.append(place)
        for name in used.reads:
            self._readers.setdefault(name, []).append(place)
        for name in writes:
            self._written[name] = place
            self._readers[name] = []
        self.before.append(found)

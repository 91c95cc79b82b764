"""List scheduling: orders of operators in which those that free memory run as early as possible.

Among the ready operators, the one that frees most goes first, if it makes no more than that; if
there is none, the next in the original order. Operators with side effects keep their order.
Scheduling from the back is the same in reversed time: an operator that makes more than it frees
goes as late as possible.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from jaxfleet.analysis.flow import Effects, OuterUses
from jaxfleet.analysis.memory import LiveRange
from jaxfleet.ir import Program


@dataclass
class OrderingConstraints:
    """The dependencies among the operators of block 0.

    An operator waits for the makers of its inputs, and for earlier readers and writers of its
    outputs, sub-blocks included; if it has side effects or is collective, for earlier operators of
    that kind. No operator passes a `cut`.
    """

    after: Sequence[set[int]]  # by index, the operators that must run after it
    before: Sequence[set[int]]  # by index, those that must run before it
    acting: AbstractSet[int]  # the indices of operators with side effects

    @classmethod
    def of(cls, program: Program) -> "OrderingConstraints":
        walk = _Walk(program)
        for place in range(len(program.root.ops)):
            walk.visit(place)
        return cls(_turned(walk.before), walk.before, walk.acting)

    def turned(self) -> "OrderingConstraints":
        """Returns the constraints in reversed time."""
        return OrderingConstraints(self.before, self.after, self.acting)

    def without(self, light: AbstractSet[int]) -> "OrderingConstraints":
        """Returns the constraints among the other operators, with some left out."""
        before: list[set[int]] = []
        for places in self.before:
            before.append({x for p in places for x in (before[p] if p in light else {p})})
        others = [set() if place in light else x for place, x in enumerate(before)]
        return OrderingConstraints(_turned(others), others, self.acting)

    def with_light(self, order: Sequence[int], light: AbstractSet[int]) -> list[int]:
        """Returns an order of the others with the light ones inserted, each as late as possible."""
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
        self._since: list[int] = []  # operators after the last cut

    def visit(self, place: int) -> None:
        op = self.program.root.ops[place]
        used = self._uses.of(op)
        # The operands of `delete_var` do not exist after it.
        writes = used.reads | used.writes if op.type == "delete_var" else used.writes
        found = {self._written[name] for name in used.reads | writes if name in self._written}
        found.update(reader for name in writes for reader in self._readers.get(name, ()))
        if self._effects.runs_once(op):
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


_GIVEN = -1  # the index of the maker of a step's inputs


def from_the_front(
    values: Sequence[LiveRange], order: Sequence[int], must: OrderingConstraints
) -> list[int]:
    """Returns another order, made from the first operator on.

    Operators that free nothing keep to `order`.
    """
    return _listed(_Forward(values, len(must.before)), order, must)


def from_the_back(
    values: Sequence[LiveRange], order: Sequence[int], must: OrderingConstraints
) -> list[int]:
    """Returns another order, made from the last operator on."""
    return _listed(_Backward(values, len(must.before)), order[::-1], must.turned())[::-1]


def depth_first(order: Sequence[int], must: OrderingConstraints) -> list[int]:
    """Returns another order, with an operator's dependencies right before it.

    Operators without dependents, and the dependencies of one operator, keep to `order`.
    """
    rank = {place: number for number, place in enumerate(order)}
    found = dict[int, None]()
    for last in (place for place in order if not must.after[place]):
        waiting = [last]
        while waiting:
            place = waiting[-1]
            needed = [other for other in must.before[place] if other not in found]
            if place in found or not needed:
                found[waiting.pop()] = None
            else:
                waiting += sorted(needed, key=lambda other: -rank[other])
    return list(found)


class _Held(ABC):
    """Tracks live values while operators run in turn, forward or from the back."""

    def __init__(self, values: Sequence[LiveRange], count: int) -> None:
        self.values = [value for value in values if value.bytes and value.made != _GIVEN]
        self.makes: list[list[int]] = [[] for _ in range(count)]
        self.reads: list[list[int]] = [[] for _ in range(count)]
        self.left = [set(value.reads) for value in self.values]  # readers that have not run
        for number, value in enumerate(self.values):
            self.makes[value.made].append(number)
            for place in self.left[number]:
                self.reads[place].append(number)

    @abstractmethod
    def change(self, place: int) -> int:
        """Returns the change in live bytes if an operator runs."""

    @abstractmethod
    def run(self, place: int) -> Iterable[int]:
        """Runs an operator; returns the operators with another change now."""


class _Forward(_Held):
    def change(self, place: int) -> int:
        made = sum(self.values[n].bytes for n in self.makes[place] if self.left[n])
        return made - sum(self.values[n].bytes for n in self.reads[place] if len(self.left[n]) == 1)

    def run(self, place: int) -> Iterable[int]:
        for number in self.reads[place]:
            left = self.left[number]
            left.discard(place)
            if len(left) == 1:
                yield from left


class _Backward(_Held):
    def change(self, place: int) -> int:
        begun = sum(self.values[n].bytes for n in self.reads[place] if self._is_dead(n))
        return begun - sum(self.values[n].bytes for n in self.makes[place] if not self._is_dead(n))

    def run(self, place: int) -> Iterable[int]:
        for number in self.reads[place]:
            was_dead = self._is_dead(number)
            self.left[number].discard(place)
            if was_dead:
                yield self.values[number].made
                yield from self.left[number]

    def _is_dead(self, number: int) -> bool:
        return len(self.left[number]) == len(set(self.values[number].reads))


def _listed(held: _Held, order: Sequence[int], must: OrderingConstraints) -> list[int]:
    rank = {place: number for number, place in enumerate(order)}
    waits = [len(places) for places in must.before]
    ready: list[tuple[int, int]] = []
    is_open = [False] * len(waits)
    found: list[int] = []

    def urgency(place: int) -> int:
        change = held.change(place)
        return 1 if change > 0 or place in must.acting else change

    def push(place: int) -> None:
        is_open[place] = True
        heapq.heappush(ready, (urgency(place), rank[place]))

    for place in order:
        if not waits[place]:
            push(place)
    while ready:
        urgent, number = heapq.heappop(ready)
        place = order[number]
        if not is_open[place] or urgent != urgency(place):
            continue  # already run, or a duplicate entry
        is_open[place] = False
        found.append(place)
        for other in held.run(place):
            if is_open[other]:
                push(other)
        for other in must.after[place]:
            waits[other] -= 1
            if not waits[other]:
                push(other)
    return found

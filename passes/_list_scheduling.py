"""Orders of operators in which what frees memory runs as soon as it can.

List scheduling: of the operators that may run now, the one goes first that frees most, if it makes
no more than that; where there is none, the next in the order there was. What acts on the world
always goes in that order. From the back it is the same with time turned round: what makes more
than it frees goes as late as it can.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from jaxfleet.analysis.memory import Value
from jaxfleet.passes._must_follow import MustFollow

_GIVEN = -1  # the place where what a step is given is made


def from_the_front(values: Sequence[Value], order: Sequence[int], must: MustFollow) -> list[int]:
    """Returns another order, made from the first operator on.

    Args:
        values: those of block 0, with the bytes that they take.
        order: places of operators; those that free nothing keep to it.
        must: what has to run before what.
    """
    return _listed(_Forward(values, len(must.before)), order, must)


def from_the_back(values: Sequence[Value], order: Sequence[int], must: MustFollow) -> list[int]:
    """Returns another order, made from the last operator on."""
    return _listed(_Backward(values, len(must.before)), order[::-1], must.turned())[::-1]


def depth_first(order: Sequence[int], must: MustFollow) -> list[int]:
    """Returns another order, in which all that an operator needs stands right before it.

    Args:
        order: places of operators; those that nothing waits for keep to it, and so does what one
            operator needs.
        must: what has to run before what.
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
    """What is alive while operators run one after another, forward or from the back."""

    def __init__(self, values: Sequence[Value], count: int) -> None:
        self.values = [value for value in values if value.bytes and value.made != _GIVEN]
        self.makes: list[list[int]] = [[] for _ in range(count)]
        self.reads: list[list[int]] = [[] for _ in range(count)]
        self.left = [set(value.reads) for value in self.values]  # readers that did not run
        for number, value in enumerate(self.values):
            self.makes[value.made].append(number)
            for place in self.left[number]:
                self.reads[place].append(number)

    @abstractmethod
    def change(self, place: int) -> int:
        """Returns how many more bytes are alive once an operator ran."""

    @abstractmethod
    def run(self, place: int) -> Iterable[int]:
        """Runs an operator; returns those whose change is another now."""


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
        """Tells whether no reader was placed yet."""
        return len(self.left[number]) == len(set(self.values[number].reads))


def _listed(held: _Held, order: Sequence[int], must: MustFollow) -> list[int]:
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
            continue  # it ran, or stands there once more
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

"""Chunks of updates that wait for all gradients, so that their temporaries do not add up."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from jaxfleet.analysis.flow import OuterUses
from jaxfleet.ir import Operator, Program, Role

_CHUNKS = 8  # approximate number of executables; more take less memory and more time


@dataclass
class UpdateChunks:
    """Divides the operators that run last.

    Attributes:
        program: the program of the operators.
        uses: the variables that its operators use.
        places: the indices of those operators, in order.
        early: temporaries that were made before them.
        light: those of the operators that need only always-available values: `0.9*mu`.
    """

    program: Program
    uses: OuterUses
    places: Sequence[int]
    early: frozenset[str]
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
        joined = (itertools.chain.from_iterable(group) for group in _groups(chains))
        return [sorted(places) for places in joined] or [[]]


def _groups(chains: Sequence[list[int]]) -> Iterator[Sequence[list[int]]]:
    size = -(-len(chains) // _CHUNKS)
    for first in range(0, len(chains), max(1, size)):
        yield chains[first : first + size]

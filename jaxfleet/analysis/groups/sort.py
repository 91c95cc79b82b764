"""Sorts the operators of an optimize section by parameter.

What updates a parameter is followed backward from its new value and its new state, as far as
values are its own. What depends on no parameter is of two kinds: scalars, which are made once for
all (schedules, counters), and arrays, which every parameter makes for itself (zeros of its shape).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jaxfleet.analysis.groups.owners import Owners, is_several


@dataclass
class Sorting:
    """Operators of block 0, by their places.

    Attributes:
        owners: whose each value is.
        leaves: state leaves by owner.
        crossing: operators that make of several parameters what an update needs.
        groups: operators that update each parameter, by its bit.
        lr: operators that depend on no parameter and serve all.
        parts: values, by owner, that `crossing` makes something of.
    """

    owners: Owners
    leaves: dict[int, list[str]] = field(default_factory=dict)
    crossing: set[int] = field(default_factory=set)
    groups: dict[int, set[int]] = field(default_factory=dict)
    lr: set[int] = field(default_factory=set)
    parts: dict[int, list[int]] = field(default_factory=dict)
    _free: set[int] = field(default_factory=set)  # values of `lr` that the others read

    @classmethod
    def of(cls, owners: Owners) -> "Sorting":
        """Sorts the operators of a section."""
        sorting = cls(owners)
        for name, owner in owners.state.items():
            sorting.leaves.setdefault(owner, []).append(name)
        sorting._sort_crossing()
        for bit in range(len(owners.params)):
            sorting._sort_group(1 << bit)
        common = [owners.graph.final[name] for name in sorting.leaves.get(0, ())]
        roots = [*common, *sorting._free]
        sorting.lr, _ = sorting._closure(roots, lambda value: not owners.own[value])
        return sorting

    def _sort_crossing(self) -> None:
        owners, graph = self.owners, self.owners.graph
        roots = [graph.final[name] for name, owner in owners.state.items() if is_several(owner)]
        for place, whose in owners.op_own.items():
            outputs = graph.nodes[place].outputs
            if is_several(whose) and any(owners.uses[value] for value in outputs):
                roots += outputs
        self.crossing, border = self._closure(roots, lambda value: is_several(owners.own[value]))
        self._free.update(value for value in border if not owners.own[value])
        for value in sorted(border):
            if owners.own[value] and graph.node_of(value) is not None:
                self.parts.setdefault(owners.own[value], []).append(value)

    def _sort_group(self, mask: int) -> None:
        owners, graph = self.owners, self.owners.graph
        names = [*owners.names(mask), *self.leaves.get(mask, ())]
        roots = [graph.final[name] for name in names if name in graph.final]

        def is_inside(value: int) -> bool:
            own = owners.own[value]
            return own == mask or (not own and bool(graph.variable(value).shape))

        found, border = self._closure([*roots, *self.parts.get(mask, ())], is_inside)
        self.groups[mask] = found
        self._free.update(value for value in border if not owners.own[value])

    def _closure(
        self, roots: Iterable[int], is_inside: Callable[[int], bool]
    ) -> tuple[set[int], set[int]]:
        """Returns the operators inside that the roots need, and the values outside they need."""
        graph = self.owners.graph
        places: set[int] = set()
        border: set[int] = set()
        left, seen = list(roots), set[int]()
        while left:
            value = left.pop()
            if value in seen:
                continue
            seen.add(value)
            node = graph.node_of(value)
            if node is None or not is_inside(value):
                border.add(value)
                continue
            places.add(graph.values[value].place)
            left += (x for x in node.inputs if x is not None)
        return places, border

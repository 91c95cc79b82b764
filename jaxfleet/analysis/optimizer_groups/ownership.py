"""Ownership of the values and operators of the optimize section by parameters.

Parameters are bits of a mask. The dependents of parameters and gradients are followed forward, the
dependencies of new parameters backward; state carries both from one step to the next. So clipping
by the global norm separates: the squares of a gradient belong to its parameter, their sum is
shared, and a gradient scaled by the sum belongs to one parameter again. Values that depend on no
parameter are of two kinds: scalars, which are computed once (schedules, counters), and arrays,
which every parameter makes for itself (zeros of its shape).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.analysis.optimizer_groups.optimize_section import SectionGraph, gradients_of, union
from jaxfleet.ir import Kind


@dataclass
class Ownership:
    """Masks of parameters, by value number unless noted."""

    graph: SectionGraph
    params: tuple[str, ...]  # a parameter for each bit
    full: list[int] = field(default_factory=list)  # the parameters that a value depends on
    uses: list[int] = field(default_factory=list)  # the parameters whose update depends on it
    # its owner: one bit; none if it depends on no parameter; several
    own: list[int] = field(default_factory=list)
    # the owner of a state leaf, by name, for those that the section reads or writes
    state: dict[str, int] = field(default_factory=dict)
    op_own: dict[int, int] = field(default_factory=dict)  # the owner of an operator, by place

    @classmethod
    def of(cls, graph: SectionGraph) -> "Ownership":
        params = tuple(v.name for v in graph.program.of_kind(Kind.PARAM))
        owners = cls(graph, params)
        owners._find_full()
        owners._find_uses()
        owners._find_own()
        return owners

    def names(self, mask: int) -> tuple[str, ...]:
        found = []
        while mask:  # as long as there are bits: a program may have 10,000 parameters
            bit = mask.bit_length() - 1
            found.append(self.params[bit])
            mask ^= 1 << bit
        return tuple(reversed(found))

    def _state_leaves(self) -> list[tuple[str, int, int]]:
        """Returns the state that the section uses: name, value before, value after."""
        graph = self.graph
        leaves = [v.name for v in graph.program.of_kind(Kind.STATE) if v.name in graph.final]
        return [(name, graph.entry.get(name, -1), graph.final[name]) for name in leaves]

    def _find_full(self) -> None:
        graph, sources = self.graph, self._sources()
        self.full = [sources.get(number, 0) for number in range(len(graph.values))]
        while True:
            for node in graph.nodes.values():
                for output, reads in zip(node.outputs, node.reads, strict=True):
                    self.full[output] = union(self.full[value] for value in reads)
            if not self._carried(self.full, backward=False):
                return

    def _find_uses(self) -> None:
        graph = self.graph
        self.uses = [0] * len(graph.values)
        for bit, name in enumerate(self.params):
            if name in graph.final:
                self.uses[graph.final[name]] |= 1 << bit
        while True:
            for node in reversed(graph.nodes.values()):
                for output, reads in zip(node.outputs, node.reads, strict=True):
                    for value in reads:
                        self.uses[value] |= self.uses[output]
            if not self._carried(self.uses, backward=True):
                return

    def _carried(self, masks: list[int], *, backward: bool) -> bool:
        """Carries masks to the next step, or back from it; returns whether any grew."""
        grew = False
        for _, entry, final in self._state_leaves():
            source, target = (entry, final) if backward else (final, entry)
            if entry >= 0 and masks[source] | masks[target] != masks[target]:
                masks[target] |= masks[source]
                grew = True
        return grew

    def _find_own(self) -> None:
        graph, sources = self.graph, self._sources()
        finals = {graph.final[name]: 1 << bit for bit, name in enumerate(self.params)
                  if name in graph.final}  # fmt: skip
        self.own = [sources.get(number, 0) for number in range(len(graph.values))]
        while True:
            for place, node in graph.nodes.items():
                for output, reads in zip(node.outputs, node.reads, strict=True):
                    self.own[output] = finals.get(output) or self._own_of(output, reads)
                whose = self.op_own[place] = union(self.own[output] for output in node.outputs)
                if is_several(whose):
                    for output in node.outputs:
                        self.own[output] = whose
            if not self._assign_state():
                return

    def _own_of(self, value: int, reads: Sequence[int]) -> int:
        if not self.full[value]:
            return 0
        if is_single(self.uses[value]):
            return self.uses[value]
        if not self.uses[value]:
            # A value that no update needs (a metric, an average of weights) belongs with its
            # operands.
            return union(self.own[x] for x in reads)
        whose = union(self.own[x] for x in reads if is_single(self.own[x]))
        common = [x for x in reads if is_several(self.own[x])]
        # An array of one parameter stays its own if a scalar of all of them scales it.
        scales = self._is_array(value) and not any(self._is_array(x) for x in common)
        if is_single(whose) and (scales or not common):
            return whose
        return self.full[value]

    def _assign_state(self) -> bool:
        """Assigns the state from the masks so far; returns whether anything is new."""
        before = dict(self.state)
        for name, entry, final in self._state_leaves():
            full, uses = self.full[final], self.uses[entry] if entry >= 0 else 0
            is_array = self._is_array(final)
            if not full:
                owner = uses if is_array and is_single(uses) else 0
            elif is_single(uses):
                owner = uses
            else:
                owner = full if uses else self.own[final]
            self.state[name] = owner
            if entry >= 0:
                self.own[entry] = owner
        return self.state != before

    def _is_array(self, value: int) -> bool:
        return bool(self.graph.variable(value).shape)

    def _sources(self) -> Mapping[int, int]:
        """Returns the values that are parameters or their gradients."""
        graph = self.graph
        gradients = gradients_of(graph.program)
        bits = {name: 1 << bit for bit, name in enumerate(self.params)}
        found = {graph.entry[name]: bit for name, bit in bits.items() if name in graph.entry}
        for number, value in enumerate(graph.values):
            if value.place < 0 and gradients.get(value.name) in bits:
                found[number] = bits[gradients[value.name]]
        return found


def is_single(mask: int) -> bool:
    """Whether a mask names one parameter."""
    return mask.bit_count() == 1


def is_several(mask: int) -> bool:
    """Whether a mask names more than one parameter."""
    return mask.bit_count() > 1


@dataclass
class OperatorOwnership:
    """Operators of block 0, by their places."""

    owners: Ownership  # of values
    leaves: dict[int, list[str]] = field(default_factory=dict)  # state leaves by owner
    # operators that combine several parameters for an update
    crossing: set[int] = field(default_factory=set)
    # operators that update each parameter, by its bit
    groups: dict[int, set[int]] = field(default_factory=dict)
    lr: set[int] = field(default_factory=set)  # operators that depend on no parameter and serve all
    # values, by owner, that `crossing` reads
    parts: dict[int, list[int]] = field(default_factory=dict)
    _free: set[int] = field(default_factory=set)  # values of `lr` that the other operators read

    @classmethod
    def of(cls, owners: Ownership) -> "OperatorOwnership":
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

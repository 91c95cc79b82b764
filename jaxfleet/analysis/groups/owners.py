"""Says whose each value of the optimize section is: one parameter's, nobody's, or several's.

Parameters are bits of a mask. What a value depends on is followed forward from parameters and
their gradients; what depends on it, backward from new parameters; state carries both from one step
to the next. So clipping by the global norm falls apart: the squares of a gradient are its
parameter's, their sum is everybody's, and what the sum scales is one parameter's again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.analysis.groups.graph import Graph
from jaxfleet.analysis.groups.inner import union
from jaxfleet.analysis.groups.section import gradients_of
from jaxfleet.ir import Kind


@dataclass
class Owners:
    """Masks of parameters, by the number of a value unless said otherwise.

    Attributes:
        graph: the values.
        params: a parameter for each bit.
        full: the parameters that a value depends on.
        uses: the parameters whose update depends on it.
        own: whose it is: one bit; none, where it depends on no parameter; several.
        state: whose a state leaf is, by name, for those that the section reads or writes.
        op_own: whose an operator is, by place.
    """

    graph: Graph
    params: tuple[str, ...]
    full: list[int] = field(default_factory=list)
    uses: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    state: dict[str, int] = field(default_factory=dict)
    op_own: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> "Owners":
        """Finds the owners of a graph's values."""
        params = tuple(v.name for v in graph.program.of_kind(Kind.PARAM))
        owners = cls(graph, params)
        owners._find_full()
        owners._find_uses()
        owners._find_own()
        return owners

    def names(self, mask: int) -> tuple[str, ...]:
        """Returns the parameters of a mask."""
        return tuple(name for bit, name in enumerate(self.params) if mask >> bit & 1)

    def _state_leaves(self) -> list[tuple[str, int, int]]:
        """Returns the state that the section sees: name, value before, value after."""
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
        """Carries masks over to the next step, or back from it; tells whether any grew."""
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
            # What no update needs (a metric, an average of weights) goes with what it is made of.
            return union(self.own[x] for x in reads)
        whose = union(self.own[x] for x in reads if is_single(self.own[x]))
        common = [x for x in reads if is_several(self.own[x])]
        # An array of one parameter stays its own when a scalar of all of them scales it.
        scales = self._is_array(value) and not any(self._is_array(x) for x in common)
        if is_single(whose) and (scales or not common):
            return whose
        return self.full[value]

    def _assign_state(self) -> bool:
        """Assigns the state by what is known so far; tells whether anything is new."""
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
    """Tells whether a mask names one parameter."""
    return mask.bit_count() == 1


def is_several(mask: int) -> bool:
    """Tells whether a mask names more than one parameter."""
    return mask.bit_count() > 1

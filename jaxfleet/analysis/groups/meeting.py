"""Finds the operator where a parameter's update first meets another parameter."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxfleet.analysis.groups.inner import Inner, union
from jaxfleet.analysis.groups.owners import Owners, is_several
from jaxfleet.analysis.groups.verdict import Reason, listed
from jaxfleet.ir import Operator


@dataclass
class Meetings:
    """Knows where the parameters of each value came together.

    Attributes:
        owners: what each value depends on.
        inner: for operators with sub-blocks.
        places: the operator, by value, for values that depend on several parameters.
    """

    owners: Owners
    inner: Inner
    places: dict[int, int] = field(default_factory=dict)
    _reasons: dict[int, Reason] = field(default_factory=dict)

    @classmethod
    def of(cls, owners: Owners, inner: Inner) -> "Meetings":
        """Finds the meetings of all values."""
        meetings = cls(owners, inner)
        meetings._pass()
        graph = owners.graph
        for name in owners.state:
            if (found := meetings.places.get(graph.final[name])) is not None:
                meetings.places.setdefault(graph.entry.get(name, -1), found)
        meetings._pass()
        return meetings

    def reason(self, value: int) -> Reason:
        """Returns why a value depends on another parameter than its own."""
        place = self.places.get(value, self.owners.graph.values[value].place)
        if place not in self._reasons:
            self._reasons[place] = self._reason(place)
        return self._reasons[place]

    def _pass(self) -> None:
        """Goes through the section; what an earlier step brought together is not known at once."""
        full = self.owners.full
        for place, node in self.owners.graph.nodes.items():
            for output, reads in zip(node.outputs, node.reads, strict=True):
                if not is_several(full[output]):
                    continue
                known = [self.places[value] for value in reads if value in self.places]
                alone = union(full[value] for value in reads if not is_several(full[value]))
                if known or is_several(alone):
                    self.places[output] = known[0] if known else place

    def _reason(self, place: int) -> Reason:
        graph, full = self.owners.graph, self.owners.full
        op, node = graph.program.root.ops[place], graph.nodes[place]
        masks = [full[x] if x is not None else 0 for x in node.inputs[: len(op.inputs)]]
        found = self._inside(op, masks)
        names = self.owners.names(union(full[output] for output in node.outputs))
        return Reason(f"{found.type} brings {listed(names)} together", found)

    def _inside(self, op: Operator, masks: Sequence[int]) -> Operator:
        """Returns the operator inside a branch that parameters meet in, or the operator itself."""
        if not self.inner.can_narrow(op):
            return op
        for index in op.blocks:
            block = self.inner.program.blocks[index]
            known = dict(zip(block.args, masks[1:], strict=True))
            self.inner.spread(block, known)
            for inside in block.ops:
                inputs = [known.get(x, 0) if isinstance(x, str) else 0 for x in inside.inputs]
                if is_several(union(inputs)) and not any(map(is_several, inputs)):
                    return self._inside(inside, inputs)
        return op

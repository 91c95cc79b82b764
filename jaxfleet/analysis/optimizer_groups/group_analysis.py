"""Optimizer groups of a captured step, and the operator where parameters first cross.

The analysis reads operators, not the optimizer's name: `clip_by_global_norm` crosses parameters
because the sum of all squares reads all gradients, and LAMB reduces rows because its norms do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from jaxfleet.analysis.optimizer_groups.branches import split_branches
from jaxfleet.analysis.optimizer_groups.extraction import Extracted, extract
from jaxfleet.analysis.optimizer_groups.optimize_section import (
    SectionGraph,
    SubblockDeps,
    gradients_of,
    union,
)
from jaxfleet.analysis.optimizer_groups.ownership import OperatorOwnership, Ownership, is_several
from jaxfleet.analysis.optimizer_groups.result import (
    OptimizerGroup,
    OptimizerGroups,
    Reason,
    RowLocality,
    joined_names,
)
from jaxfleet.analysis.optimizer_groups.row_locality import RowPlan, plan_rows
from jaxfleet.ir import Kind, Operator, Program


@dataclass
class Crossings:
    """The operator at which the parameters of each value first meet."""

    owners: Ownership  # the dependencies of each value
    inner: SubblockDeps  # for operators with sub-blocks
    # the operator, by value, for values that depend on several parameters
    places: dict[int, int] = field(default_factory=dict)
    _reasons: dict[int, Reason] = field(default_factory=dict)

    @classmethod
    def of(cls, owners: Ownership, inner: SubblockDeps) -> "Crossings":
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
        """Visits the section once; parameters that met in an earlier step need another visit."""
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
        return Reason(f"{found.type} brings {joined_names(names)} together", found)

    def _inside(self, op: Operator, masks: Sequence[int]) -> Operator:
        """Returns the operator inside a branch at which parameters meet, or the operator itself."""
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


def find_optimizer_groups(program: Program) -> OptimizerGroups:
    """Returns the optimize groups of a captured step.

    The step has roles, and pairs of parameters and gradients at the operators that make the
    gradients. Its optimizer's branches over all parameters are split first; the result refers to
    the split program. Results of the last programs are kept: the passes of a job ask one after
    another, and those of all its servers about the same program.
    """
    return _groups_of(_SameObject(program))


@dataclass(frozen=True, eq=False, slots=True)
class _SameObject:
    """A program as a key: equal to itself alone, as comparing its operators would take as long."""

    program: Program

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and other.program is self.program

    def __hash__(self) -> int:
        return id(self.program)


@lru_cache(maxsize=2)
def _groups_of(key: _SameObject) -> OptimizerGroups:
    split = split_branches(key.program)
    inner, owners = SubblockDeps(split), Ownership.of(SectionGraph.of(split))
    sorting = OperatorOwnership.of(owners)
    groups = _Groups(split, inner, sorting, Crossings.of(owners, inner)).all()
    state, nodes = owners.state.items(), owners.graph.nodes
    known = sorting.crossing.union(sorting.lr, *sorting.groups.values())
    written = {name for place in nodes for name in split.root.ops[place].writes}
    return OptimizerGroups(
        owners.graph,
        groups,
        tuple(sorted(sorting.lr)),
        tuple(name for name, owner in state if not owner and name in written),
        tuple(sorted(sorting.crossing)),
        tuple(name for name, owner in state if is_several(owner)),
        tuple(place for place in nodes if place not in known),
    )


@dataclass
class _Groups:
    """Makes groups of sorted operators."""

    program: Program
    inner: SubblockDeps
    sorting: OperatorOwnership
    meetings: Crossings
    gradients: dict[str, list[str]] = field(default_factory=dict)  # by parameter
    writers: dict[str, int] = field(default_factory=dict)  # the place of each variable's last write

    def all(self) -> tuple[OptimizerGroup, ...]:
        for gradient, param in gradients_of(self.program).items():
            self.gradients.setdefault(param, []).append(gradient)
        for place, op in enumerate(self.program.root.ops):
            self.writers.update(dict.fromkeys(op.writes, place))
        return tuple(self._group(mask) for mask in self.sorting.groups)

    def _group(self, mask: int) -> OptimizerGroup:
        owners = self.sorting.owners
        (param,) = owners.names(mask)
        state = tuple(self.sorting.leaves.get(mask, ()))
        extracted = self._extracted(mask, param, state)
        program = extracted.program
        finals = [owners.graph.final[x] for x in (param, *state) if x in owners.graph.final]
        met = [value for value in finals if owners.full[value] & ~mask]
        fed, gradients = [v.name for v in program.of_kind(Kind.DATA)], self.gradients.get(param, [])
        rows = self._rows(mask, program, (param, *state), gradients)
        return OptimizerGroup(
            param=self.program.variables[param],
            gradients=tuple(name for name in fed if name in gradients),
            state=state,
            shared=tuple(name for name in fed if name not in gradients),
            ops=tuple(sorted(self.sorting.groups[mask])),
            program=program,
            sources=extracted.sources,
            crossing=self.meetings.reason(met[0]) if met else self._outside(param),
            others=owners.names(union(owners.full[value] for value in met) & ~mask),
            rows=rows.rows,
            reason=rows.reason,
        )

    def _extracted(self, mask: int, param: str, state: Sequence[str]) -> Extracted:
        return extract(
            self.sorting.owners.graph,
            self.inner,
            sorted(self.sorting.groups[mask]),
            own=(param, *state),
            fetched=self.sorting.parts.get(mask, ()),
            name=f"{self.program.name}.{param}",
        )

    def _rows(
        self, mask: int, program: Program, own: Sequence[str], gradients: Sequence[str]
    ) -> RowPlan:
        for name in own:
            place = self.writers.get(name)
            if place is not None and place not in self.sorting.groups[mask]:
                op = self.program.root.ops[place]
                why = Reason(f"leaves '{name}' to an operator that is not its own", op)
                return RowPlan(RowLocality.WHOLE, why)
        return plan_rows(program, own[0], gradients=gradients, rowless=self._rowless(own))

    def _rowless(self, own: Sequence[str]) -> list[str]:
        """Returns state arrays made of a parameter's rows that have another row count."""
        variables, owners = self.program.variables, self.sorting.owners
        made = [name for name in own[1:] if owners.full[owners.graph.final[name]]]
        rows = variables[own[0]].shape[:1]
        return [x for x in made if variables[x].shape and variables[x].shape[:1] != rows]

    def _outside(self, param: str) -> Reason | None:
        """Returns the reason that a parameter is updated outside the section, if it is."""
        place = self.writers.get(param)
        if place is None or place in self.sorting.owners.graph.nodes:
            return None
        op = self.program.root.ops[place]
        return Reason(f"{op.type} updates it outside the optimize section", op)

"""Says of a captured step which operators update which parameter, and where they may be cut.

Whatever the optimizer is called, its operators are read: `clip_by_global_norm` crosses parameters
because the sum of all squares reads all gradients, and LAMB reduces rows because its norms do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxfleet.analysis.groups.extract import Extracted, extract
from jaxfleet.analysis.groups.graph import Graph
from jaxfleet.analysis.groups.inner import Inner, union
from jaxfleet.analysis.groups.meeting import Meetings
from jaxfleet.analysis.groups.owners import Owners, is_several
from jaxfleet.analysis.groups.rows import RowPlan, plan_rows
from jaxfleet.analysis.groups.section import gradients_of
from jaxfleet.analysis.groups.sort import Sorting
from jaxfleet.analysis.groups.split import split_branches
from jaxfleet.analysis.groups.verdict import Group, OptimizeGroups, Reason, Rows
from jaxfleet.ir import Kind, Program


def optimize_groups(program: Program) -> OptimizeGroups:
    """Returns the optimize groups of a captured step.

    Args:
        program: a step with roles, and with the pairs of parameters and gradients at the
            operators that make the gradients. Its optimizer's branches over all parameters are
            split first; the result holds the program that it speaks of.
    """
    split = split_branches(program)
    inner, owners = Inner(split), Owners.of(Graph.of(split))
    sorting = Sorting.of(owners)
    groups = _Groups(split, inner, sorting, Meetings.of(owners, inner)).all()
    state, nodes = owners.state.items(), owners.graph.nodes
    known = sorting.crossing.union(sorting.lr, *sorting.groups.values())
    written = {name for place in nodes for name in split.root.ops[place].writes}
    return OptimizeGroups(
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
    """Makes groups of sorted operators.

    Attributes:
        gradients: by parameter.
        writers: the place that each variable is written at last.
    """

    program: Program
    inner: Inner
    sorting: Sorting
    meetings: Meetings
    gradients: dict[str, list[str]] = field(default_factory=dict)
    writers: dict[str, int] = field(default_factory=dict)

    def all(self) -> tuple[Group, ...]:
        """Returns the group of every parameter."""
        for gradient, param in gradients_of(self.program).items():
            self.gradients.setdefault(param, []).append(gradient)
        for place, op in enumerate(self.program.root.ops):
            self.writers.update(dict.fromkeys(op.writes, place))
        return tuple(self._group(mask) for mask in self.sorting.groups)

    def _group(self, mask: int) -> Group:
        owners = self.sorting.owners
        (param,) = owners.names(mask)
        state = tuple(self.sorting.leaves.get(mask, ()))
        extracted = self._extracted(mask, param, state)
        program = extracted.program
        finals = [owners.graph.final[x] for x in (param, *state) if x in owners.graph.final]
        met = [value for value in finals if owners.full[value] & ~mask]
        fed, gradients = [v.name for v in program.of_kind(Kind.DATA)], self.gradients.get(param, [])
        rows = self._rows(mask, program, (param, *state), gradients)
        return Group(
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
                return RowPlan(Rows.WHOLE, why)
        return plan_rows(program, own[0], gradients=gradients, rowless=self._rowless(own))

    def _rowless(self, own: Sequence[str]) -> list[str]:
        """Returns the arrays of a parameter's state that are made of rows and have others."""
        variables, owners = self.program.variables, self.sorting.owners
        made = [name for name in own[1:] if owners.full[owners.graph.final[name]]]
        rows = variables[own[0]].shape[:1]
        return [x for x in made if variables[x].shape and variables[x].shape[:1] != rows]

    def _outside(self, param: str) -> Reason | None:
        """Returns that a parameter is updated outside the section, where it is."""
        place = self.writers.get(param)
        if place is None or place in self.sorting.owners.graph.nodes:
            return None
        op = self.program.root.ops[place]
        return Reason(f"{op.type} updates it outside the optimize section", op)

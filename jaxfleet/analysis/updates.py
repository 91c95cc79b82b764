"""The update of each parameter, read from operator roles, as fluid's dialect declares it.

A captured JAX step only records the gradient of each parameter, and
`jaxfleet.analysis.optimizer_groups` derives the update from its data flow. A fluid program declares
it: every operator has a role, and an operator of the optimize section names its parameter and
gradient (`for (w, w@GRAD)`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Operator, Program, Role, Variable

DIALECT = "dialect"
FLUID = "fluid"

_SCHEDULE = (Role.LR_SCHED, Role.OPTIMIZE_LR_SCHED)
# The result of these for some rows differs from those rows of their result for all.
_NEEDS_ALL_ROWS = frozenset({"dpsgd", "lamb", "lars_momentum"})

LOOKUPS = frozenset({"lookup_table", "lookup_table_v2"})


def looks_up(op: Operator, table: str) -> bool:
    """Whether an operator takes rows of a table."""
    return op.type in LOOKUPS and op.inputs.slot("W") == (table,)


def is_fluid_dialect(program: Program) -> bool:
    """Whether roles declare the updates, as in a fluid program."""
    return program.attrs.get(DIALECT) == FLUID


@dataclass(frozen=True)
class Updates:
    """The optimize section of a program, as its roles declare it."""

    program: Program

    @cached_property
    def ops(self) -> tuple[Operator, ...]:
        """The operators of the optimize section, in order, except those of schedules."""
        return tuple(op for op in self.program.root.ops if op.role is Role.OPTIMIZE)

    @cached_property
    def schedule(self) -> tuple[Operator, ...]:
        """The operators that compute learning rates."""
        return tuple(op for op in self.program.root.ops if op.role in _SCHEDULE)

    @cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Each parameter with the gradient that is sent, distributed tables excluded."""
        return tuple(pair for pair in self.all_pairs if pair[0] not in self.tables)

    @cached_property
    def all_pairs(self) -> tuple[tuple[str, str], ...]:
        """Each parameter with the gradient that is sent, in the order of their updates.

        A program without updates, or with one of a variable that it lacks, is a PassError.
        """
        found: dict[str, str] = {}
        for op in self.ops:
            for param, gradient in op.role_var[:1]:
                found.setdefault(param, gradient)
        if not found:
            what = f"program '{self.program.name}' updates no parameter"
            raise PassError(what, hint="call minimize(loss) before it is transpiled")
        for param, gradient in found.items():
            for name in (param, gradient):
                self.program.lookup(name)
            if not any("Param" in dict(op.inputs.slots) for op in self.of(param)):
                raise PassError(f"nothing updates '{param}'", op=self.of(param)[0])
        self._check_kept()
        return tuple(found.items())

    def _check_kept(self) -> None:
        """Rejects state beside the updates, such as averages, which neither side keeps."""
        for op in self.ops:
            kept = [n for n in op.writes if self.variable(n).kind in {Kind.PARAM, Kind.STATE}]
            if kept and not op.role_var and not op.inputs.slot("Param"):
                what = f"'{op.type}' writes '{kept[0]}', and belongs to no parameter's update"
                hint = "ModelAverage, Lookahead, mixed precision and the like work in one process"
                raise PassError(what, op=op, hint=f"{hint}: leave them out where servers update")

    def of(self, param: str) -> tuple[Operator, ...]:
        """Returns the operators marked with a parameter, its update among them."""
        return self._by_param.get(param, ())

    @cached_property
    def _by_param(self) -> Mapping[str, tuple[Operator, ...]]:
        found: dict[str, list[Operator]] = {}
        for op in self.ops:
            for param, _ in op.role_var[:1]:
                found.setdefault(param, []).append(op)
        return {param: tuple(ops) for param, ops in found.items()}

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The index of each parameter's update, by the operator that writes it."""
        updates = (op for op in self.ops if op.role_var and op.inputs.slot("Param"))
        return {op.role_var[0][0]: at for at, op in enumerate(updates)}

    def is_cuttable(self, param: str) -> bool:
        """Whether some rows of a parameter can be updated without the others."""
        types = {op.type for op in self.of(param)}
        return types.isdisjoint(_NEEDS_ALL_ROWS)

    @cached_property
    def sparse(self) -> frozenset[str]:
        """The gradients that are rows of their parameters, with the rows' numbers."""
        found: set[str] = set()
        for op in self.program.root.ops:
            is_rows = op.type == "sum" and set(op.reads) <= found
            if is_rows or (op.type.endswith("_grad") and op.attrs.get("is_sparse")):
                found.update(op.writes)
        return frozenset(found)

    @cached_property
    def prefetched(self) -> frozenset[str]:
        """The tables whose rows trainers fetch on demand, and never hold."""
        return self._looked_up(lambda op: bool(op.attrs.get("is_sparse"))) - self.tables

    @cached_property
    def tables(self) -> frozenset[str]:
        """The distributed tables: `is_distributed=True`."""
        return self._looked_up(lambda op: bool(op.attrs.get("is_distributed")))

    def _looked_up(self, is_wanted: Callable[[Operator], bool]) -> frozenset[str]:
        return frozenset(
            name
            for op in self.program.root.ops
            if is_wanted(op) and not op.type.endswith("_grad")
            for name in op.inputs.slot("W")
            if isinstance(name, str)
        )

    def variable(self, name: str) -> Variable:
        return self.program.lookup(name)

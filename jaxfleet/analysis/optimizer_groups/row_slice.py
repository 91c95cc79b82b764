"""Rewrites a row-local group for a slice of its parameter's rows, of any size."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.optimizer_groups.result import OptimizerGroup, RowLocality
from jaxfleet.analysis.optimizer_groups.row_locality import (
    BroadcastRows,
    plan_rows,
)
from jaxfleet.analysis.sharding import REPLICATED, BlockPlan, Mesh, OpPlan, Sharding, sharded
from jaxfleet.errors import PassError
from jaxfleet.ir import Block, Kind, Operand, Operator, Program, Variable
from jaxfleet.ir.naming import unique


def cut_rows(group: OptimizerGroup) -> Program:
    """Returns a row-local group's program for some rows; their number is the letter `rows`.

    Run on slices of the parameter, its gradient and its state along axis 0, it gives the slices of
    the group's results. Constants derived from the number of rows (a division by `shape[0]`) keep
    the number of the whole. A group that is not row-local is a PassError.
    """
    if group.rows is not RowLocality.LOCAL:
        what = f"the group of '{group.name}' is {group.rows.value}: it cannot be cut along its rows"
        op = group.reason.op if group.reason is not None else None
        raise PassError(what, op=op, hint="keep the parameter whole")
    program = group.program
    found = plan_rows(program, group.name, gradients=group.gradients, rowless=())
    assert found.uniform is not None
    plan, mesh = found.uniform.plan, found.uniform.mesh
    blocks = [
        _Cutter(program, block, plan.blocks[block.index], found.uniform, found.cut).run()
        for block in program.blocks
    ]
    variables = {
        name: _with_rows(v, sharded(0), mesh) if name in found.cut else v
        for name, v in program.variables.items()
    }
    return replace(program, variables=variables, blocks=tuple(blocks))


@dataclass
class _Cutter:
    """Rewrites one block for some rows."""

    program: Program
    block: Block
    plan: BlockPlan
    uniform: BroadcastRows
    cut: frozenset[str]  # the program's variables that are cut along axis 0
    ops: list[Operator] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    # the name for all of a variable, if it has another one
    whole: dict[str, str] = field(default_factory=dict)
    # the name for some rows of a variable along an axis, if both exist
    some: dict[tuple[str, int], str] = field(default_factory=dict)

    def run(self) -> Block:
        block = self.block
        self.variables = dict(block.variables)
        for name, label in zip(block.args, self.plan.args, strict=True):
            self._declare(block.variables[name], label)
        for at, (op, plan) in enumerate(zip(block.ops, self.plan.ops, strict=True)):
            self._place(at, op, plan)
        results = self._operands(block.results, self.plan.found, self.plan.results)
        ops = _needed(self.ops, {*results, *(v.name for v in self.program.variables.values())})
        new = replace(block, ops=tuple(ops), variables=self.variables, results=tuple(results))
        return new.without_unused()

    def _place(self, at: int, op: Operator, plan: OpPlan) -> None:
        placing, narrow = plan.placing, self.uniform.narrow.get((self.block.index, at), [])
        inputs = self._operands(op.inputs, plan.labels, placing.inputs)
        narrow_inputs = [
            [self._held(x, axis) for x, axis in zip(op.inputs, found.inputs, strict=True)]
            for found in narrow
        ]
        outputs = [self._output(*pair) for pair in zip(op.writes, plan.outputs, strict=True)]
        new = replace(op, inputs=op.inputs.replaced(inputs), attrs=placing.attrs)
        self.ops.append(replace(new, outputs=op.outputs.replaced(outputs)))
        for found, operands in zip(narrow, narrow_inputs, strict=True):
            output = op.outputs.replaced([self._narrow_output(op.writes[0], found.axis)])
            new = replace(op, inputs=op.inputs.replaced(operands), outputs=output)
            self.ops.append(replace(new, attrs=found.attrs))

    def _operands(
        self, operands: Sequence[Operand], labels: Sequence[Sharding], wanted: Sequence[Sharding]
    ) -> list[Operand]:
        return [
            self._held(operand, want.axis if label != want and want.is_sharded else None)
            for operand, label, want in zip(operands, labels, wanted, strict=True)
        ]

    def _held(self, operand: Operand, axis: int | None) -> Operand:
        """Returns the name for some rows of a variable along an axis, or for the variable."""
        if not isinstance(operand, str):
            return operand
        return self.whole.get(operand, operand) if axis is None else self.some[operand, axis]

    def _output(self, name: str, label: Sharding) -> str:
        """Declares an output, and drops the names of the old value."""
        self.some = {key: held for key, held in self.some.items() if key[0] != name}
        self.whole.pop(name, None)
        if name in self.cut and label == REPLICATED:
            whole = replace(self.program.variables[name], kind=Kind.TEMP)
            self.whole[name] = self._temporary(whole, "whole", REPLICATED)
        elif name in self.block.variables:
            self._declare(self.block.variables[name], label)
        return self.whole.get(name, name)

    def _narrow_output(self, name: str, axis: int) -> str:
        if name in self.cut and axis == 0:
            self.some[name, axis] = name
        else:
            variable = self.block.variables.get(name) or self.program.lookup(name, self.block)
            self.some[name, axis] = self._temporary(variable, "rows", sharded(axis))
        return self.some[name, axis]

    def _temporary(self, like: Variable, suffix: str, label: Sharding) -> str:
        name = unique(f"{like.name}.{suffix}", {*self.variables, *self.program.variables})
        self._declare(replace(like, name=name, kind=Kind.TEMP), label)
        return name

    def _declare(self, variable: Variable, label: Sharding) -> None:
        self.variables[variable.name] = _with_rows(variable, label, self.uniform.mesh)


def _with_rows(variable: Variable, label: Sharding, mesh: Mesh) -> Variable:
    return replace(variable, shape=mesh.local_shape(variable.shape, label))


def _needed(ops: Sequence[Operator], names: set[Operand]) -> list[Operator]:
    """Returns the operators that the named variables need at the end of a block."""
    kept: list[Operator] = []
    for op in reversed(ops):
        if names.intersection(op.writes) or not op.writes:
            names |= set(op.reads)
            kept.append(op)
    return kept[::-1]

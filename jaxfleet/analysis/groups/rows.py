"""Finds out whether a group can run on some rows of its parameter alone.

The parameter, its gradient and what else of its state has as many rows are cut along axis 0, and
the label rules follow the cut through the group, as they follow the batch through a step. The
group is row-local where everything that it writes ends up cut along axis 0, nothing is gathered or
completed on the way, and what meets the rows without being cut is the same for all rows.

What is asked is whether slices give what the whole gives, exactly. So a division by `shape[0]`, or
a Python branch on it, is row-local: the captured program holds the number of rows of the whole,
784.0, and goes on to hold it when the rows are cut. A mean over the rows is a sum and such a
division, and so row-reducing.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from jaxfleet.analysis.groups.uniform import Uniform
from jaxfleet.analysis.groups.verdict import Reason, Rows
from jaxfleet.analysis.labels import (
    REPLICATED,
    VARYING,
    Label,
    Layout,
    Mesh,
    OpPlan,
    Plan,
    infer,
    sharded,
)
from jaxfleet.errors import PassError
from jaxfleet.ir import Block, Kind, Operand, Operator, Program, Size
from jaxfleet.ir.dims import letter

ROWS = "rows"  # the letter for the number of rows in a program that is cut
_LOOPS = frozenset({"jax.scan", "jax.while"})


@dataclass(frozen=True)
class RowMesh(Mesh):
    """Says of sizes how much of them goes with some of the rows: a multiple of a letter.

    Attributes:
        count: how many rows the parameter has.
    """

    count: int = 1

    def part(self, size: Size) -> Size | None:
        """Returns what goes with `ROWS` rows, or None where rows do not divide the size."""
        if not isinstance(size, int) or size == 0 or size % self.count:
            return None
        return letter(ROWS) * (size // self.count)


@dataclass(frozen=True)
class RowPlan:
    """How a group runs on some of the rows.

    Attributes:
        rows: the verdict.
        reason: why it is not row-local, or None.
        uniform: the labels, and what must run on some rows besides; None for `keep-whole`.
        cut: the variables that are cut along axis 0.
    """

    rows: Rows
    reason: Reason | None
    uniform: Uniform | None = None
    cut: frozenset[str] = frozenset()


def plan_rows(
    program: Program, param: str, *, gradients: Collection[str], rowless: Sequence[str]
) -> RowPlan:
    """Returns how a group runs on some of its parameter's rows.

    Args:
        program: the group, as a program.
        param: its parameter.
        gradients: the gradients among its data.
        rowless: state that is made from rows, is no scalar, and has not as many rows.
    """
    shape = program.variables[param].shape
    if (why := _uncuttable(shape)) is not None:
        return RowPlan(Rows.WHOLE, Reason(why))
    if rowless:
        what = f"keeps '{program.variables[rowless[0]]}', made of all of its rows"
        return RowPlan(Rows.WHOLE, Reason(what, _maker(program.root, rowless[0])))
    rows = shape[0]
    assert isinstance(rows, int)
    cut = frozenset(
        v.name
        for v in program.variables.values()
        if v.shape[:1] == (rows,) and (v.kind.persistable or v.name in gradients)
    )
    mesh = RowMesh(rows, letter=None, count=rows)
    try:
        plan = infer(program, mesh, sharded_inputs=dict.fromkeys(cut, 0))
    except PassError as error:  # a sub-block that reads around itself
        return RowPlan(Rows.WHOLE, Reason(f"does what labels do not follow: {error}"))
    uniform = Uniform(program, plan, mesh)
    for found in _Check(program, plan, uniform, cut).obstacles():
        return RowPlan(Rows.WHOLE, found)
    for op in (*_reductions(program, plan), *_completed(program, plan)):
        return RowPlan(Rows.REDUCING, Reason(f"reduces its rows by {op.type}", op), uniform, cut)
    return RowPlan(Rows.LOCAL, None, uniform, cut)


def _uncuttable(shape: Sequence[Size]) -> str | None:
    """Returns why a shape has no rows to cut, or None."""
    if not shape:
        return "a scalar has no rows"
    if not all(isinstance(size, int) for size in shape):
        return "its size is not known before the program runs"
    if 0 in shape:
        return "it has no elements"
    return "it has a single row" if shape[0] == 1 else None


@dataclass
class _Check:
    """Goes through a plan and finds what needs more than some of the rows.

    Attributes:
        program: the group.
        plan: its labels.
        uniform: is asked for what is to run on some rows besides.
        cut: the variables that are cut at the start, and must be at the end.
    """

    program: Program
    plan: Plan
    uniform: Uniform
    cut: frozenset[str]

    def obstacles(self) -> Iterator[Reason]:
        """Yields what stands against cutting the rows, block by block."""
        for index, plan in sorted(self.plan.blocks.items()):
            block = self.program.blocks[index]
            for at, (op, found) in enumerate(zip(block.ops, plan.ops, strict=True)):
                yield from self._operator(block, at, op, found)
            ends = zip(block.results, plan.found, plan.results, strict=True)
            for result, label, wanted in ends:
                yield from self._lies(block, len(block.ops), result, label, wanted)
        root, final = self.program.root, self.plan.blocks[0].final
        for variable in self.program.of_kind(Kind.PARAM, Kind.STATE):
            name = variable.name
            wanted = sharded(0) if name in self.cut else REPLICATED
            yield from self._lies(root, len(root.ops), name, final[name], wanted)
        yield from self._looped_reductions()

    def _operator(self, block: Block, at: int, op: Operator, plan: OpPlan) -> Iterator[Reason]:
        placing = plan.placing
        if VARYING in (*placing.inputs, *placing.outputs):
            loop = _runner(self.program, block) or op
            yield Reason(f"goes over its rows one by one in {loop.type}", loop)
        if placing.op_type:
            yield Reason(f"needs to know which rows it has in {op.type}", op)
        if op.type == "fetch" and any(label.is_sharded for label in plan.labels):
            yield Reason("gives its rows to the updates of other parameters", op)
        for operand, label, wanted in zip(op.inputs, plan.labels, placing.inputs, strict=True):
            yield from self._lies(block, at, operand, label, wanted, reader=op)

    def _lies(
        self,
        block: Block,
        at: int,
        operand: Operand,
        label: Label,
        wanted: Label,
        *,
        reader: Operator | None = None,
    ) -> Iterator[Reason]:
        """Yields why a value does not lie as it must, and cannot be made to from some rows."""
        if label == wanted or not (label.is_sharded or wanted.is_sharded):
            return
        reader = reader or _maker(block, operand)
        if label != REPLICATED:
            what = reader.type if reader is not None else "a branch"
            yield Reason(f"needs all of its rows in {what}", reader)
        elif (why := self.uniform.want(block, at, operand, wanted.axis, reader)) is not None:
            yield why

    def _looped_reductions(self) -> Iterator[Reason]:
        """Yields reductions over rows inside loops: each turn would wait for all slices."""
        looped: set[int] = set()
        for block in self.program.blocks:
            for op in block.ops:
                if op.type in _LOOPS or block.index in looped:
                    looped.update(op.blocks)
        for op in _completed(self.program, self.plan, among=looped):
            yield Reason(f"reduces its rows in a loop, by {op.type}", op)


def _reductions(program: Program, plan: Plan) -> Iterator[Operator]:
    """Yields the operators that make parts of a reduction out of rows."""
    for index, block_plan in sorted(plan.blocks.items()):
        for op, found in zip(program.blocks[index].ops, block_plan.ops, strict=True):
            makes_parts = any(x.layout is Layout.PARTIAL for x in found.placing.outputs)
            if makes_parts and any(label.is_sharded for label in found.labels):
                yield op


def _completed(
    program: Program, plan: Plan, *, among: Collection[int] | None = None
) -> Iterator[Operator]:
    """Yields the operators whose results must be completed, in some blocks or in all."""
    for index, at, _ in plan.completions():
        if among is None or index in among:
            yield program.blocks[index].ops[at]


def _runner(program: Program, inner: Block) -> Operator | None:
    """Returns the operator that a block is a sub-block of."""
    ops = (op for block in program.blocks for op in block.ops)
    return next((op for op in ops if inner.index in op.blocks), None)


def _maker(block: Block, operand: Operand) -> Operator | None:
    """Returns the operator that wrote a variable last."""
    return next((op for op in reversed(block.ops) if operand in op.writes), None)

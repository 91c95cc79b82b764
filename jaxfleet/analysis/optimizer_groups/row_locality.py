"""Row locality: whether a group can run on some rows of its parameter alone.

The parameter, its gradient and state with as many rows are cut along axis 0, and the sharding rules
propagate the cut through the group, as they propagate the batch through a step. The group is
row-local if everything that it writes ends up cut along axis 0, nothing is gathered or completed on
the way, and every uncut value that joins the rows is the same for all rows.

Slices must give exactly the rows of the whole result. So a division by `shape[0]`, or a Python
branch on it, is row-local: the captured program contains the number of rows of the whole, 784.0,
also after the rows are cut. A mean over the rows is a sum and such a division, and so row-reducing.

An optimizer broadcasts scalars to its parameter's shape. Such a value depends on no rows but is
combined with them; for a slice of the rows it must be made with the slice's shape. That holds for
broadcasts along the axis that is cut, and for values computed from them by operators that keep the
axis. An iota along the axis, random bits and constants are not narrowed.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.optimizer_groups.result import Reason, RowLocality
from jaxfleet.analysis.sharding import (
    REPLICATED,
    VARYING,
    Mesh,
    OpPlan,
    Sharding,
    ShardingKind,
    ShardingPlan,
    propagate,
    sharded,
)
from jaxfleet.analysis.sharding.plan import OperatorView
from jaxfleet.analysis.sharding.rules import operator_sharding as place_on_rows
from jaxfleet.errors import PassError
from jaxfleet.ir import Attrs, Block, Kind, Operand, Operator, Program, Size, Variable
from jaxfleet.ir.dims import letter


@dataclass(frozen=True)
class NarrowedOperator:
    """How an operator with one output makes some rows of it."""

    axis: int  # the axis of its output that is cut
    attrs: Attrs  # its attributes for these rows
    inputs: tuple[int | None, ...]  # the axis that each operand must be cut along, None for whole


@dataclass
class BroadcastRows:
    """Collects the operators that must run on some rows in addition to the whole."""

    program: Program
    plan: ShardingPlan
    mesh: Mesh  # the number of rows
    # the operators to narrow, by block and place
    narrow: dict[tuple[int, int], list[NarrowedOperator]] = field(default_factory=dict)

    def want(
        self, block: Block, at: int, operand: Operand, axis: int, reader: Operator | None
    ) -> Reason | None:
        """Requests some rows of an operand; returns why there are none, or None.

        The reader is at place `at` of `block`, or at the end; `reader` names it in the reason.
        """
        origin = _origin(block, at, operand)
        if origin is None:
            return Reason(f"reads all of '{operand}' beside its rows", reader)
        op, found = block.ops[origin], self.narrow.setdefault((block.index, origin), [])
        if any(known.axis == axis for known in found):
            return None
        made = self._narrow(block, origin, axis)
        if isinstance(made, Reason):
            return made
        found.append(made)
        for x, cut in zip(op.inputs, made.inputs, strict=True):
            if cut is not None and (why := self.want(block, origin, x, cut, op)) is not None:
                return why
        return None

    def _narrow(self, block: Block, place: int, axis: int) -> NarrowedOperator | Reason:
        """Returns how an operator makes some rows of its output, or why it cannot."""
        op, labels = block.ops[place], self.plan.blocks[block.index].ops[place].labels
        is_whole = len(op.writes) == 1 and all(label == REPLICATED for label in labels)

        def find(name: str) -> Variable:
            return block.variables.get(name) or self.program.lookup(name, block)

        view = OperatorView.of(op, labels, self.mesh, find)
        if is_whole and self.mesh.part(view.out_shapes[0][axis]) is not None:
            if (made := _made_along(view, axis)) is not None:
                return made
            for trial in _trials(view, axis):
                placing = place_on_rows(trial)
                if not placing.note and placing.outputs[0] == sharded(axis):
                    cuts = tuple(x.axis if x.is_sharded else None for x in placing.inputs)
                    return NarrowedOperator(axis, placing.attrs, cuts)
        return Reason(_why_not(op), op)


def _origin(block: Block, at: int, operand: Operand) -> int | None:
    """Returns the operator that makes an operand, or None if it is not of this block."""
    return next((x for x in reversed(range(at)) if operand in block.ops[x].writes), None)


def _made_along(view: OperatorView, axis: int) -> NarrowedOperator | None:
    """Narrows an operator whose rows are all equal, or that counts along another axis."""
    op, shape = view.op, view.out_shapes[0]
    if op.type == "jax.iota":
        is_uniform = op.attrs["dimension"] != axis
    elif op.type == "jax.broadcast_in_dim":
        kept = view.ints("broadcast_dimensions")
        is_uniform = axis not in kept or view.shapes[0][kept.index(axis)] != shape[axis]
    else:
        return None
    attrs = op.attrs.updated(shape=view.mesh.local_shape(shape, sharded(axis)))
    return NarrowedOperator(axis, attrs, (None,) * len(view.shapes)) if is_uniform else None


def _trials(view: OperatorView, axis: int) -> Iterator[OperatorView]:
    """Yields the operator with one of its operands cut, along the likeliest axis first."""
    if view.op.blocks:
        return
    for place, shape in enumerate(view.shapes):
        for cut in sorted(range(len(shape)), key=lambda found: found != axis):
            if view.mesh.part(shape[cut]) is not None:
                before, after = view.labels[:place], view.labels[place + 1 :]
                yield replace(view, labels=(*before, sharded(cut), *after))


def _why_not(op: Operator) -> str:
    if op.type == "jax.iota":
        return "counts its rows"
    if op.type.startswith("jax.random"):
        return "draws random numbers for all of its rows at once"
    return f"needs all of what {op.type} makes beside its rows"


ROWS = "rows"  # the letter for the number of rows of a slice
_LOOPS = frozenset({"jax.scan", "jax.while"})


@dataclass(frozen=True)
class RowMesh(Mesh):
    """The part of a size that belongs to some of the rows: a multiple of a letter."""

    count: int = 1  # the number of rows of the parameter

    def part(self, size: Size) -> Size | None:
        """Returns the part for `ROWS` rows, or None if the rows do not divide the size."""
        if not isinstance(size, int) or size == 0 or size % self.count:
            return None
        return letter(ROWS) * (size // self.count)


@dataclass(frozen=True)
class RowPlan:
    """How a group runs on some of the rows."""

    rows: RowLocality
    reason: Reason | None  # why it is not row-local, or None
    # the labels, and the operators to run on some rows besides; None for `keep-whole`
    uniform: BroadcastRows | None = None
    cut: frozenset[str] = frozenset()  # the variables that are cut along axis 0


def plan_rows(
    program: Program, param: str, *, gradients: Collection[str], rowless: Sequence[str]
) -> RowPlan:
    """Returns how a group runs on some of its parameter's rows.

    `rowless` is non-scalar state that is made from rows but has another number of rows.
    """
    shape = program.variables[param].shape
    if (why := _uncuttable(shape)) is not None:
        return RowPlan(RowLocality.WHOLE, Reason(why))
    if rowless:
        what = f"keeps '{program.variables[rowless[0]]}', made of all of its rows"
        return RowPlan(RowLocality.WHOLE, Reason(what, _maker(program.root, rowless[0])))
    rows = shape[0]
    assert isinstance(rows, int)
    cut = frozenset(
        v.name
        for v in program.variables.values()
        if v.shape[:1] == (rows,) and (v.kind.persistable or v.name in gradients)
    )
    mesh = RowMesh(rows, letter=None, count=rows)
    try:
        plan = propagate(program, mesh, sharded_inputs=dict.fromkeys(cut, 0))
    except PassError as error:  # a sub-block that reads around itself
        return RowPlan(RowLocality.WHOLE, Reason(f"does what labels do not follow: {error}"))
    uniform = BroadcastRows(program, plan, mesh)
    for found in _Check(program, plan, uniform, cut).obstacles():
        return RowPlan(RowLocality.WHOLE, found)
    for op in (*_reductions(program, plan), *_completed(program, plan)):
        return RowPlan(
            RowLocality.REDUCING, Reason(f"reduces its rows by {op.type}", op), uniform, cut
        )
    return RowPlan(RowLocality.LOCAL, None, uniform, cut)


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
    """Visits a plan and finds the operators that need more than some of the rows."""

    program: Program
    plan: ShardingPlan
    uniform: BroadcastRows  # collects the operators to run on some rows besides
    cut: frozenset[str]  # the variables that are cut at the start, and must be at the end

    def obstacles(self) -> Iterator[Reason]:
        """Yields the obstacles to cutting the rows, block by block."""
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
        label: Sharding,
        wanted: Sharding,
        *,
        reader: Operator | None = None,
    ) -> Iterator[Reason]:
        """Yields a reason if a value is not laid out as required and cannot be narrowed to be."""
        if label == wanted or not (label.is_sharded or wanted.is_sharded):
            return
        reader = reader or _maker(block, operand)
        if label != REPLICATED:
            what = reader.type if reader is not None else "a branch"
            yield Reason(f"needs all of its rows in {what}", reader)
        elif (why := self.uniform.want(block, at, operand, wanted.axis, reader)) is not None:
            yield why

    def _looped_reductions(self) -> Iterator[Reason]:
        """Yields reductions over rows inside loops: each iteration would wait for all slices."""
        looped: set[int] = set()
        for block in self.program.blocks:
            for op in block.ops:
                if op.type in _LOOPS or block.index in looped:
                    looped.update(op.blocks)
        for op in _completed(self.program, self.plan, among=looped):
            yield Reason(f"reduces its rows in a loop, by {op.type}", op)


def _reductions(program: Program, plan: ShardingPlan) -> Iterator[Operator]:
    """Yields the operators that reduce rows to partial results."""
    for index, block_plan in sorted(plan.blocks.items()):
        for op, found in zip(program.blocks[index].ops, block_plan.ops, strict=True):
            makes_parts = any(x.layout is ShardingKind.PARTIAL for x in found.placing.outputs)
            if makes_parts and any(label.is_sharded for label in found.labels):
                yield op


def _completed(
    program: Program, plan: ShardingPlan, *, among: Collection[int] | None = None
) -> Iterator[Operator]:
    """Yields the operators whose results must be completed, in some blocks or in all."""
    for index, at, _ in plan.completions():
        if among is None or index in among:
            yield program.blocks[index].ops[at]


def _runner(program: Program, inner: Block) -> Operator | None:
    """Returns the operator whose sub-block a block is."""
    ops = (op for block in program.blocks for op in block.ops)
    return next((op for op in ops if inner.index in op.blocks), None)


def _maker(block: Block, operand: Operand) -> Operator | None:
    """Returns the last operator to write a variable."""
    return next((op for op in reversed(block.ops) if operand in op.writes), None)

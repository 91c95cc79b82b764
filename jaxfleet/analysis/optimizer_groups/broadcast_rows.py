"""Narrows broadcast values, whose rows are all equal, to the rows of a slice.

An optimizer broadcasts scalars to its parameter's shape. Such a value depends on no rows but is
combined with them; for a slice of the rows it must be made with the slice's shape. That holds for
broadcasts along the axis that is cut, and for values computed from them by operators that keep the
axis. An iota along the axis, random bits and constants are not narrowed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.optimizer_groups.result import Reason
from jaxfleet.analysis.sharding import REPLICATED, Mesh, Sharding, ShardingPlan, sharded
from jaxfleet.analysis.sharding.plan import OperatorView
from jaxfleet.analysis.sharding.rules import operator_sharding as place_on_rows
from jaxfleet.ir import Attrs, Block, Literal, Operand, Operator, Program, Variable


@dataclass(frozen=True)
class NarrowedOperator:
    """How an operator with one output makes some rows of it.

    Attributes:
        axis: the axis of its output that is cut.
        attrs: its attributes for these rows.
        inputs: the axis that each operand must be cut along, None for whole.
    """

    axis: int
    attrs: Attrs
    inputs: tuple[int | None, ...]


@dataclass
class BroadcastRows:
    """Collects the operators that must run on some rows in addition to the whole.

    Attributes:
        program: the program that contains them.
        plan: its sharding plan.
        mesh: the number of rows.
        narrow: the operators to narrow, by block and place.
    """

    program: Program
    plan: ShardingPlan
    mesh: Mesh
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
        view = _view(self.program, block, op, labels, self.mesh)
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


def _view(
    program: Program, block: Block, op: Operator, labels: tuple[Sharding, ...], mesh: Mesh
) -> OperatorView:
    """Returns the view of an operator for sharding rules."""

    def variable(operand: Operand) -> Variable:
        if isinstance(operand, Literal):
            return Variable("", operand.dtype, ())
        return block.variables.get(operand) or program.lookup(operand, block)

    ins, outs = [variable(x) for x in op.inputs], [variable(x) for x in op.writes]
    return OperatorView(
        op,
        labels,
        tuple(x.shape for x in ins),
        tuple(x.shape for x in outs),
        mesh,
        tuple(x.dtype for x in ins),
        tuple(x.dtype for x in outs),
    )


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

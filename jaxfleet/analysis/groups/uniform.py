"""Makes less of values whose rows are all alike, where some rows of them are asked for.

An optimizer broadcasts scalars to its parameter's shape. Such a value depends on no rows, and yet
it meets them; on a slice of the rows it must be made with the slice's shape. That is so for what is
broadcast along the axis that is cut, and for what is computed of such values by operators that
keep the axis. An iota along the axis, random bits and constants are not made so.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.groups.verdict import Reason
from jaxfleet.analysis.labels import REPLICATED, Label, Mesh, Plan, sharded
from jaxfleet.analysis.labels.placing import View
from jaxfleet.analysis.labels.rules import place as place_on_rows
from jaxfleet.ir import Attrs, Block, Literal, Operand, Operator, Program, Variable


@dataclass(frozen=True)
class Narrow:
    """Says how an operator with one output makes some rows of it.

    Attributes:
        axis: the axis of its output that is cut.
        attrs: its attributes then.
        inputs: the axis that each operand must be cut along, None for whole.
    """

    axis: int
    attrs: Attrs
    inputs: tuple[int | None, ...]


@dataclass
class Uniform:
    """Collects the operators that must run on some rows besides running whole.

    Attributes:
        program: what they are in.
        plan: how its values lie.
        mesh: how many rows there are.
        narrow: what was asked for, by block and place.
    """

    program: Program
    plan: Plan
    mesh: Mesh
    narrow: dict[tuple[int, int], list[Narrow]] = field(default_factory=dict)

    def want(
        self, block: Block, at: int, operand: Operand, axis: int, reader: Operator | None
    ) -> Reason | None:
        """Asks for some rows of what an operand holds; returns why there are none, or None.

        Args:
            block: where it is read.
            at: the place that it is read at; the number of operators, at the end.
            operand: what is read.
            axis: the axis that is cut.
            reader: what reads it, for the reason.
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

    def _narrow(self, block: Block, place: int, axis: int) -> Narrow | Reason:
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
                    return Narrow(axis, placing.attrs, cuts)
        return Reason(_why_not(op), op)


def _origin(block: Block, at: int, operand: Operand) -> int | None:
    """Returns the operator that an operand comes from, None where it is not of this block."""
    return next((x for x in reversed(range(at)) if operand in block.ops[x].writes), None)


def _view(
    program: Program, block: Block, op: Operator, labels: tuple[Label, ...], mesh: Mesh
) -> View:
    """Returns what label rules see of an operator."""

    def variable(operand: Operand) -> Variable:
        if isinstance(operand, Literal):
            return Variable("", operand.dtype, ())
        return block.variables.get(operand) or program.lookup(operand, block)

    ins, outs = [variable(x) for x in op.inputs], [variable(x) for x in op.writes]
    return View(
        op,
        labels,
        tuple(x.shape for x in ins),
        tuple(x.shape for x in outs),
        mesh,
        tuple(x.dtype for x in ins),
        tuple(x.dtype for x in outs),
    )


def _made_along(view: View, axis: int) -> Narrow | None:
    """Returns how to make less of what has one row for all, or counts along another axis."""
    op, shape = view.op, view.out_shapes[0]
    if op.type == "jax.iota":
        is_uniform = op.attrs["dimension"] != axis
    elif op.type == "jax.broadcast_in_dim":
        kept = view.ints("broadcast_dimensions")
        is_uniform = axis not in kept or view.shapes[0][kept.index(axis)] != shape[axis]
    else:
        return None
    attrs = op.attrs.updated(shape=view.mesh.local_shape(shape, sharded(axis)))
    return Narrow(axis, attrs, (None,) * len(view.shapes)) if is_uniform else None


def _trials(view: View, axis: int) -> Iterator[View]:
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

"""Whether operators make of each row of the batch what they would make of it at any other place."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from jaxfleet.analysis.labels import elementwise
from jaxfleet.analysis.labels.plan import Plan
from jaxfleet.ir import Block, Literal, Operand, Operator

_EVEN = frozenset({"jax.broadcast_in_dim"})  # makes rows of nothing, all of them alike
_ELEMENTWISE = (
    elementwise.ADDITIVE | elementwise.LINEAR | elementwise.NONLINEAR | {"jax.mul", "jax.div"}
)


def keeps_rows(plan: Plan, block: Block, places: AbstractSet[int] | None = None) -> bool:
    """Whether a block makes of each row what it would make of it at any other place.

    Args:
        plan: how the program runs on devices.
        block: one of its blocks.
        places: the operators that are looked at; all of them, unless given.
    """
    makers = {name: op for op in block.ops for name in op.writes}
    planned = zip(block.ops, plan.blocks[block.index].ops, strict=True)
    for place, (op, found) in enumerate(planned):
        if places is not None and place not in places:
            continue
        if found.completed or found.placing.note:
            return False
        lie = list(zip(op.inputs, found.labels, found.placing.inputs, strict=True))
        for operand, label, wanted in lie:
            cut = wanted.is_sharded and not label.is_sharded
            if label.is_sharded and label != wanted:
                return False
            if cut and not _is_even(operand, wanted.axis, makers):
                return False
        makes_rows = any(label.is_sharded for label in found.outputs)
        if makes_rows and not any(x.is_sharded for _, x, _ in lie) and op.type not in _EVEN:
            return False
    return True


def _is_even(operand: Operand, axis: int, makers: Mapping[str, Operator]) -> bool:
    """Whether all rows of a value are equal."""
    if isinstance(operand, Literal):
        return True
    op = makers.get(operand)
    if op is None or op.type not in _EVEN | _ELEMENTWISE:
        return False
    if op.type in _EVEN:
        places = op.attrs["broadcast_dimensions"]
        assert isinstance(places, tuple)
        return axis not in places
    return all(_is_even(value, axis, makers) for value in op.inputs)

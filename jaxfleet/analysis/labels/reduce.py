"""Rules for reductions and contractions: reducing the cut axis leaves each device a part."""

from jaxfleet.analysis.labels.label import (
    SUM,
    Label,
    Placing,
    View,
    along,
    as_ints,
    gathered,
    partial,
    settle,
    sharded,
)
from jaxfleet.ir import Attr, Struct

_COMPLETED_BY = {
    "jax.reduce_sum": "sum",
    "jax.reduce_max": "max",
    "jax.reduce_min": "min",
    "jax.reduce_prod": "prod",
    "jax.reduce_and": "and",
    "jax.reduce_or": "or",
}


def reduction(view: View) -> Placing:
    """Reduces rows to a part of the result."""
    axes, label, axis = view.ints("axes"), view.labels[0], view.axis(0)
    if axis is None:
        is_sum = label.is_sum and view.op.type == "jax.reduce_sum"
        kept = label if is_sum else settle(label)
        return along(view, (kept,), kept)
    if axis in axes:
        return along(view, (label,), partial(_COMPLETED_BY[view.op.type]))
    return along(view, (label,), sharded(axis - sum(place < axis for place in axes)))


def arg_reduction(view: View) -> Placing:
    """Finds the place of an extreme; over rows that takes all of them."""
    axes, label, axis = view.ints("axes"), view.labels[0], view.axis(0)
    if axis is None:
        return along(view, (settle(label),), view.settled)
    if axis in axes:
        return gathered(view, f"{view.op.type} looks for a row among all rows")
    return along(view, (label,), sharded(axis - sum(place < axis for place in axes)))


def dot_general(view: View) -> Placing:
    """Contracts rows to summands, or keeps them as rows of the result."""
    (contract, batch) = _pairs(view.op.attrs["dimension_numbers"])
    if view.axis(0) is None and view.axis(1) is None:
        return _bilinear(view)
    lead = 0 if view.axis(0) is not None else 1
    axis = view.axis(lead)
    assert axis is not None
    if axis in contract[lead]:
        other = contract[1 - lead][contract[lead].index(axis)]
        return _both(view, lead, axis, other, SUM)
    if axis in batch[lead]:
        place = batch[lead].index(axis)
        return _both(view, lead, axis, batch[1 - lead][place], sharded(place))
    second = view.axis(1)
    if lead == 0 and second is not None and second in (*contract[1], *batch[1]):
        return _from_second(view, contract, batch, second)
    free = [place for place in range(len(view.shapes[lead])) if place not in contract[lead]]
    free = [place for place in free if place not in batch[lead]]
    out = len(batch[0]) + free.index(axis)
    if lead == 1:
        out += len(view.shapes[0]) - len(contract[0]) - len(batch[0])
    inputs = [settle(label) for label in view.labels]
    inputs[lead] = view.labels[lead]
    both_cut = view.axis(1 - lead) is not None
    placing = along(view, inputs, sharded(out))
    note = "both sides of the product keep the batch axis: one is gathered" if both_cut else ""
    return Placing(placing.inputs, placing.outputs, placing.attrs, note=note)


def convolution(view: View) -> Placing:
    """Convolves rows, or contracts them: the gradient of a kernel sums over the batch."""
    numbers = view.op.attrs["dimension_numbers"]
    assert isinstance(numbers, Struct)
    lhs, rhs, out = (as_ints(numbers.fields[f"{name}_spec"]) for name in ("lhs", "rhs", "out"))
    left, right = view.axis(0), view.axis(1)
    if left is None and right is None:
        return _bilinear(view)
    if left == lhs[0] and right is None and view.op.attrs["batch_group_count"] == 1:
        return along(view, (view.labels[0], settle(view.labels[1])), sharded(out[0]))
    is_contraction = left in {None, lhs[1]} and right in {None, rhs[1]}
    if is_contraction and view.op.attrs["feature_group_count"] == 1:
        return along(view, (sharded(lhs[1]), sharded(rhs[1])), SUM)
    return gathered(view, "the convolution mixes rows")


def _bilinear(view: View) -> Placing:
    """Keeps one summand a summand; two would multiply their parts."""
    if sum(label.is_sum for label in view.labels) == 1:
        inputs = tuple(label if label.is_sum else settle(label) for label in view.labels)
        return along(view, inputs, SUM)
    return along(view, tuple(settle(label) for label in view.labels), view.settled)


def _both(view: View, lead: int, axis: int, other: int, out: Label) -> Placing:
    inputs = (sharded(axis), sharded(other)) if lead == 0 else (sharded(other), sharded(axis))
    return along(view, inputs, out)


def _from_second(
    view: View, contract: "Pair", batch: "Pair", axis: int
) -> Placing:
    """Cuts the first operand as the second is cut, along the axis that they share."""
    if axis in contract[1]:
        other = contract[0][contract[1].index(axis)]
        placing = along(view, (sharded(other), sharded(axis)), SUM)
    else:
        place = batch[1].index(axis)
        placing = along(view, (sharded(batch[0][place]), sharded(axis)), sharded(place))
    note = "the operands of the product are cut along different axes: one is gathered"
    return Placing(placing.inputs, placing.outputs, placing.attrs, note=note)


Pair = tuple[tuple[int, ...], tuple[int, ...]]


def _pairs(numbers: Attr) -> tuple[Pair, Pair]:
    assert isinstance(numbers, tuple)
    contract, batch = numbers
    assert isinstance(contract, tuple)
    assert isinstance(batch, tuple)
    return (as_ints(contract[0]), as_ints(contract[1])), (as_ints(batch[0]), as_ints(batch[1]))

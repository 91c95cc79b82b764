"""Sharding rules for products, convolutions and reductions, which may give partial results."""

from typing import TypeAlias

from jaxfleet.analysis.sharding.rule_api import (
    OperatorSharding,
    OperatorView,
    along,
    as_ints,
    gathered,
    whole,
)
from jaxfleet.analysis.sharding.spec import SUM, Sharding, completed, partial, sharded
from jaxfleet.ir import Attr, Size, Struct

Pair: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def dot_general(view: OperatorView) -> OperatorSharding:
    """Contracts rows to summands, or keeps them as rows of the result.

    If one operand is cut along a contracted axis and the other along an axis that it keeps, the
    first is gathered: the rows of the second are rows of the result then, and nothing is summed.
    """
    left, right = view.axis(0), view.axis(1)
    if left is None and right is None:
        return _bilinear(view)
    contract, batch = _pairs(view.op.attrs["dimension_numbers"])
    for side, axis in ((0, right), (1, left)):
        if _keeps(view, side, contract, batch) and axis in {None, *contract[1 - side]}:
            return _free(view, side, contract, batch)
    for one, other in zip(*contract, strict=True):
        if one == left or other == right:
            return _both(view, one, other, SUM)
    for place, (one, other) in enumerate(zip(*batch, strict=True)):
        if one == left or other == right:
            return _both(view, one, other, sharded(place))
    return _free(view, 0, contract, batch)


def _keeps(view: OperatorView, side: int, contract: Pair, batch: Pair) -> bool:
    """Whether an operand's rows are neither contracted nor paired with the other's."""
    axis = view.axis(side)
    return axis is not None and axis not in (*contract[side], *batch[side])


def _both(view: OperatorView, one: int, other: int, out: Sharding) -> OperatorSharding:
    """Cuts both operands along an axis that they share."""
    return along(view, (sharded(one), sharded(other)), out)


def _free(view: OperatorView, lead: int, contract: Pair, batch: Pair) -> OperatorSharding:
    """Keeps the rows of one operand as rows of the result; the other is whole."""
    free = [
        [axis for axis in range(len(shape)) if axis not in (*contract[side], *batch[side])]
        for side, shape in enumerate(view.shapes)
    ]
    axis = view.axis(lead)
    assert axis is not None
    out = len(batch[0]) + free[lead].index(axis) + (len(free[0]) if lead else 0)
    inputs = [completed(label) for label in view.labels]
    inputs[lead] = view.labels[lead]
    placing = along(view, inputs, sharded(out))
    return placing.noting(_BOTH_ROWS) if view.axis(1 - lead) is not None else placing


def convolution(view: OperatorView) -> OperatorSharding:
    """Convolves rows, or contracts them: the gradient of a kernel sums over the batch."""
    numbers = view.op.attrs["dimension_numbers"]
    assert isinstance(numbers, Struct)
    lhs, rhs, out = (as_ints(numbers.fields[f"{name}_spec"]) for name in ("lhs", "rhs", "out"))
    left, right = view.axis(0), view.axis(1)
    if left is None and right is None:
        return _bilinear(view)
    groups, batch_groups = (view.op.attrs[f"{x}_group_count"] for x in ("feature", "batch"))
    if left == lhs[0] and right is None and batch_groups == 1:
        return along(view, (view.labels[0], completed(view.labels[1])), sharded(out[0]))
    if left in {None, lhs[1]} and right in {None, rhs[1]} and groups == 1:
        return along(view, (sharded(lhs[1]), sharded(rhs[1])), SUM)
    for name, grouped in (("feature", lhs[1]), ("batch", lhs[0])):
        if left in {None, grouped} and right in {None, rhs[0]}:
            placing = _grouped(view, f"{name}_group_count", grouped, rhs[0], out[1])
            if placing is not None:
                return placing
    return gathered(view, "the convolution mixes rows")


def _grouped(
    view: OperatorView, name: str, left: int, right: int, out: int
) -> OperatorSharding | None:
    """Shards a convolution by its groups, or returns None.

    Groups are blocks of consecutive features of the result and of the kernel, and of consecutive
    features (rows, for a batch group) of the left operand.
    """
    groups = view.op.attrs[name]
    assert isinstance(groups, Size)
    part = view.mesh.part(groups) if groups != 1 else None
    if part is None:
        return None
    return along(view, (sharded(left), sharded(right)), sharded(out), **{name: part})


def _bilinear(view: OperatorView) -> OperatorSharding:
    """Keeps one summand a summand; two would multiply their partial sums."""
    if view.labels.count(SUM) == 1:
        return along(view, [x if x.is_sum else completed(x) for x in view.labels], SUM)
    return whole(view)


def _pairs(numbers: Attr) -> tuple[Pair, Pair]:
    assert isinstance(numbers, tuple)
    contract, batch = numbers
    assert isinstance(contract, tuple)
    assert isinstance(batch, tuple)
    return (as_ints(contract[0]), as_ints(contract[1])), (as_ints(batch[0]), as_ints(batch[1]))


_BOTH_ROWS = "both sides of the product have rows of the batch: one is gathered"

REDUCTIONS = frozenset(
    f"jax.reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or", "xor")
)


def reduction(view: OperatorView) -> OperatorSharding:
    """Reduces rows to a partial result."""
    axes, label, axis = view.ints("axes"), view.labels[0], view.axis(0)
    how = view.op.type.removeprefix("jax.reduce_")
    if axis is None:
        is_sum = label.is_sum and how == "sum"
        return along(view, (SUM,), SUM) if is_sum else whole(view)
    if axis in axes:
        return along(view, (label,), partial(how))
    return along(view, (label,), sharded(axis - sum(place < axis for place in axes)))


def arg_reduction(view: OperatorView) -> OperatorSharding:
    """Finds the place of an extreme; over the rows, this gathers them."""
    axes, axis = view.ints("axes"), view.axis(0)
    if axis is None:
        return whole(view)
    if axis in axes:
        return gathered(view, f"{view.op.type} looks for a row among all rows")
    return along(view, view.labels, sharded(axis - sum(place < axis for place in axes)))

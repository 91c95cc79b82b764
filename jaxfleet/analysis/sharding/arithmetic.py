"""Sharding rules for element-wise operators, products and reductions.

Element-wise: all inputs have one shape, or are scalars, or are broadcast along axes of size one. If
one is cut, all are cut alike. A sum stays partial through every operator that is linear in it.
Products and reductions of rows give partial results.
"""

from collections import Counter
from typing import TypeAlias

from jaxfleet.analysis.sharding.plan import (
    OperatorSharding,
    OperatorView,
    along,
    as_ints,
    gathered,
    whole,
)
from jaxfleet.analysis.sharding.spec import (
    REPLICATED,
    SUM,
    VARYING,
    Sharding,
    completed,
    partial,
    sharded,
)
from jaxfleet.ir import Attr, Size, Struct

ADDITIVE = frozenset({"jax.add", "jax.sub", "jax.add_any"})
LINEAR = frozenset(
    {"assign", *(f"jax.{name}" for name in ("neg", "copy", "name", "real", "imag", "conj"))}
)
NONLINEAR = frozenset(
    f"jax.{name}"
    for name in (
        *("abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh"),
        *("bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz"),
        *("complex", "cos", "cosh", "digamma", "eq", "eq_to", "erf", "erf_inv", "erfc"),
        *("exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac"),
        *("integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2", "logistic"),
        *("lt", "lt_to", "max", "min", "ne", "nextafter", "not", "one_minus_square", "or"),
        *("polygamma", "polynomial", "population_count", "pow", "random_fold_in", "random_seed"),
        *("random_gamma_grad", "random_unwrap", "random_wrap"),
        *("reduce_precision", "regularized_incomplete_beta", "rem", "round"),
        *("rsqrt", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin"),
        *("sinh", "sqrt", "square", "stop_gradient", "tan", "tanh", "threefry2x32", "xor", "zeta"),
    )
)
_WIDENING = frozenset({("bf16", "f32"), ("f16", "f32"), ("f32", "f64"), ("bf16", "f64")})


def nonlinear(view: OperatorView) -> OperatorSharding:
    """Requires complete values, unless they are rows."""
    axis = _common_axis(view)
    if axis is None:
        return whole(view)
    if not _lines_up(view, axis):
        return gathered(view, f"the rows of {view.op.type} do not line up")
    inputs = [_beside_rows(view, place, axis) for place in range(len(view.labels))]
    return along(view, inputs, *[sharded(axis)] * len(view.out_shapes))


def additive(view: OperatorView) -> OperatorSharding:
    """Adds summands to summands; a replicated value counts once.

    Where the result is needed complete, a sum is completed before it is added to a complete value.
    """
    if view.has_rows or VARYING in view.labels or SUM not in view.labels:
        return nonlinear(view)
    parts = (label.is_sum or place in view.zeros for place, label in enumerate(view.labels))
    if view.completes and not all(parts):
        return whole(view)
    return along(view, (SUM,) * len(view.labels), SUM)


def linear(view: OperatorView) -> OperatorSharding:
    """Keeps every label."""
    kept = [x if x.is_sum or x.is_sharded else completed(x) for x in view.labels]
    return along(view, kept, *kept)


def multiply(view: OperatorView) -> OperatorSharding:
    """Multiplies one summand by complete values."""
    if view.has_rows or view.labels.count(SUM) != 1 or _completes_smaller(view):
        return nonlinear(view)
    return along(view, [x if x.is_sum else completed(x) for x in view.labels], SUM)


def divide(view: OperatorView) -> OperatorSharding:
    """Divides a summand by a complete value; integers round, so an integer sum is completed first.

    Dividing by zero, summands of both signs give nan and their sum infinity.
    """
    is_float = view.out_dtypes[0].lstrip("b").startswith(("f", "c"))
    if view.has_rows or not (view.labels[0].is_sum and is_float) or _completes_smaller(view):
        return nonlinear(view)
    return along(view, (SUM, completed(view.labels[1])), SUM)


def convert(view: OperatorView) -> OperatorSharding:
    """Widens summands; narrowing rounds, so it requires the complete sum."""
    widening = (view.dtypes[0], view.out_dtypes[0]) in _WIDENING
    if view.labels[0].is_sum and (widening or view.dtypes[0] == view.out_dtypes[0]):
        return along(view, (SUM,), SUM)
    return nonlinear(view)


def select(view: OperatorView) -> OperatorSharding:
    """Selects among summands by a condition that is the same on every device."""
    if view.has_rows or VARYING in view.labels or SUM not in view.labels[1:]:
        return nonlinear(view)
    return along(view, (REPLICATED, *[SUM] * (len(view.labels) - 1)), SUM)


def _completes_smaller(view: OperatorView) -> bool:
    """Whether completing a sum before it grows is cheaper."""
    grows = any(
        label.is_sum and shape != view.out_shapes[0]
        for label, shape in zip(view.labels, view.shapes, strict=True)
    )
    return view.completes and grows


def _common_axis(view: OperatorView) -> int | None:
    """Returns the axis along which most of the row operands are cut."""
    axes = Counter(label.axis for label in view.labels if label.is_sharded)
    return axes.most_common(1)[0][0] if axes else None


def _lines_up(view: OperatorView, axis: int) -> bool:
    """Whether the cut axis is the same in all operands.

    It is not where an operator splits elements, as a bitcast to bytes does, on the last axis.
    """
    rows = next(
        shape[axis]
        for shape, label in zip(view.shapes, view.labels, strict=True)
        if label == sharded(axis)
    )
    ranks = {len(shape) for shape in view.shapes if shape}
    return len(ranks) == 1 and all(
        axis < len(shape) and shape[axis] == rows for shape in view.out_shapes
    )


def _beside_rows(view: OperatorView, place: int, axis: int) -> Sharding:
    """Returns an input's layout beside rows: cut too, unless it has one row for all."""
    shape, label = view.shapes[place], view.labels[place]
    has_rows = bool(shape) and (shape[axis] != 1 or label == sharded(axis))
    return sharded(axis) if has_rows else completed(label)


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

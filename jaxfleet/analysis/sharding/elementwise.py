"""Sharding rules for element-wise operators.

All inputs have one shape, or are scalars, or are broadcast along axes of size one. If one is cut,
all are cut alike. A sum stays partial through every operator that is linear in it.
"""

from collections import Counter

from jaxfleet.analysis.sharding.rule_api import (
    OperatorSharding,
    OperatorView,
    along,
    gathered,
    whole,
)
from jaxfleet.analysis.sharding.spec import REPLICATED, SUM, VARYING, Sharding, completed, sharded

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

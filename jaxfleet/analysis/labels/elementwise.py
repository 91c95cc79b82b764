"""Rules for operators that work element by element.

All inputs have one shape, or are scalars. If one is cut, all are cut alike. A sum stays partial
through what is linear in it.
"""

from jaxfleet.analysis.labels.label import (
    REPLICATED,
    SUM,
    VARYING,
    Label,
    Placing,
    View,
    along,
    settle,
    sharded,
)

ADDITIVE = frozenset({"jax.add", "jax.sub", "jax.add_any"})
LINEAR = frozenset({"assign", *(f"jax.{name}" for name in ("neg", "copy", "name", "real", "imag"))})
NONLINEAR = frozenset(
    f"jax.{name}"
    for name in (
        *("abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh"),
        *("bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz"),
        *("complex", "conj", "cos", "cosh", "digamma", "eq", "eq_to", "erf", "erf_inv", "erfc"),
        *("exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac"),
        *("integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2", "logistic"),
        *("lt", "lt_to", "max", "min", "ne", "nextafter", "not", "one_minus_square", "or"),
        *("polygamma", "polynomial", "population_count", "pow", "random_fold_in", "random_gamma"),
        *("random_seed", "reduce_precision", "regularized_incomplete_beta", "rem", "round"),
        *("rsqrt", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin"),
        *("sinh", "sqrt", "square", "stop_gradient", "tan", "tanh", "threefry2x32", "xor", "zeta"),
        *("random_wrap", "random_unwrap"),  # the axis they add or take away is the last
    )
)
_WIDENING = frozenset({("bf16", "f32"), ("f16", "f32"), ("f32", "f64"), ("bf16", "f64")})


def nonlinear(view: View) -> Placing:
    """Wants complete values, unless they are rows."""
    axis = _common_axis(view)
    if axis is None:
        inputs = tuple(settle(label) for label in view.labels)
        return along(view, inputs, *[view.settled] * len(view.out_shapes))
    inputs = tuple(_rows(view, place, axis) for place in range(len(view.labels)))
    return along(view, inputs, *[sharded(axis)] * len(view.out_shapes))


def additive(view: View) -> Placing:
    """Adds summands to summands; what every device has counts once."""
    if _has_rows(view) or VARYING in view.labels or SUM not in view.labels:
        return nonlinear(view)
    return along(view, (SUM,) * len(view.labels), SUM)


def linear(view: View) -> Placing:
    """Keeps every label."""
    outputs = tuple(label if label.is_sum or label.is_sharded else settle(label)
                    for label in view.labels)  # fmt: skip
    return along(view, outputs, *outputs)


def multiply(view: View) -> Placing:
    """Multiplies one summand by what is complete."""
    if _has_rows(view) or view.labels.count(SUM) != 1:
        return nonlinear(view)
    return along(view, tuple(x if x.is_sum else settle(x) for x in view.labels), SUM)


def divide(view: View) -> Placing:
    """Divides a summand by what is complete; integers round, so theirs is completed first."""
    is_float = view.out_dtypes[0].lstrip("b").startswith(("f", "c"))
    if _has_rows(view) or view.labels[0] != SUM or view.labels[1].is_sum or not is_float:
        return nonlinear(view)
    return along(view, (SUM, settle(view.labels[1])), SUM)


def convert(view: View) -> Placing:
    """Widens summands; a narrowing rounds, so it wants the complete sum."""
    widening = (view.dtypes[0], view.out_dtypes[0]) in _WIDENING
    if view.labels[0].is_sum and (widening or view.dtypes[0] == view.out_dtypes[0]):
        return along(view, (SUM,), SUM)
    return nonlinear(view)


def select(view: View) -> Placing:
    """Chooses among summands by what every device agrees on."""
    if _has_rows(view) or VARYING in view.labels or SUM not in view.labels[1:]:
        return nonlinear(view)
    return along(view, (REPLICATED, *[SUM] * (len(view.labels) - 1)), SUM)


def _has_rows(view: View) -> bool:
    return any(label.is_sharded for label in view.labels)


def _common_axis(view: View) -> int | None:
    return next((label.axis for label in view.labels if label.is_sharded), None)


def _rows(view: View, place: int, axis: int) -> Label:
    """Returns how an input must lie beside rows: cut too, unless it has one row for all."""
    shape = view.shapes[place]
    has_rows = bool(shape) and shape[axis] != 1
    return sharded(axis) if has_rows else settle(view.labels[place])

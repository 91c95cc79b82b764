"""Computes scalars that are known before a program runs: `1.0 / b` once `b` has a value."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxfleet.ir import Attrs, Literal
from jaxfleet.ir.constants import numpy_dtype

_COMPARE: Mapping[str, Callable[..., Any]] = {
    "jax.eq": np.equal,
    "jax.ne": np.not_equal,
    "jax.lt": np.less,
    "jax.le": np.less_equal,
    "jax.gt": np.greater,
    "jax.ge": np.greater_equal,
}
_COMPUTE: Mapping[str, Callable[..., Any]] = {
    "jax.add": np.add,
    "jax.sub": np.subtract,
    "jax.mul": np.multiply,
    "jax.max": np.maximum,
    "jax.min": np.minimum,
    "jax.neg": np.negative,
    "jax.sqrt": np.sqrt,
    "jax.floor": np.floor,
    "jax.rem": np.fmod,
    "jax.and": np.bitwise_and,
    "jax.or": np.bitwise_or,
    "jax.not": np.bitwise_not,
}


def fold(op_type: str, inputs: Sequence[Literal], attrs: Attrs) -> Literal | None:
    """Returns what a scalar operator makes of known inputs, or None where that is not known here.

    Args:
        op_type: an operator with one output.
        inputs: all of its inputs.
        attrs: its attributes, letters replaced.
    """
    if op_type == "jax.dim_value":
        size, dtype = attrs["dim"], attrs["dtype"]
        return _literal(size, str(dtype)) if isinstance(size, int) else None
    if not inputs:
        return None
    values = [np.asarray(x.value, dtype=numpy_dtype(x.dtype)) for x in inputs]
    with np.errstate(all="ignore"):  # what overflows does so in the step too
        return _fold(op_type, inputs, values, attrs)


def _fold(
    op_type: str, inputs: Sequence[Literal], values: Sequence[Any], attrs: Attrs
) -> Literal | None:
    dtype = inputs[0].dtype
    match op_type:
        case "jax.convert_element_type":
            return _literal(values[0], str(attrs["new_dtype"]))
        case "jax.select_n":
            return inputs[1 + int(values[0])]
        case "jax.div" if values[0].dtype.kind in "iu":
            return _literal(_divided(int(values[0]), int(values[1])), dtype) if values[1] else None
        case "jax.div":
            return _literal(values[0] / values[1], dtype)
    if op_type in _COMPARE:
        return _literal(_COMPARE[op_type](*values), "bool")
    if op_type in _COMPUTE:
        return _literal(_COMPUTE[op_type](*values), dtype)
    return None


def _divided(x: int, y: int) -> int:
    """Divides as XLA does, towards zero."""
    quotient = abs(x) // abs(y)
    return quotient if (x < 0) == (y < 0) else -quotient


def _literal(value: Any, dtype: str) -> Literal:
    return Literal.of(np.asarray(value).astype(numpy_dtype(dtype)).item(), dtype)

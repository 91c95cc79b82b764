"""Folding of integers that are known at capture, mostly indices.

With a symbolic batch size jax emits operators for arithmetic that it otherwise does in Python:
`x[:, 1:]` gathers at an index computed by `iota`, `mul` and `add`.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxfleet.ir import Attrs, Dim, Literal, Size

Known: TypeAlias = np.ndarray[Any, np.dtype[np.object_]]  # of int, bool and Dim
"""A known value: an array of any rank whose elements are numbers or sizes."""

_MOST_ELEMENTS = 64  # an index that jax makes of a slice has a few; longer ones are the user's
_RANGES: Mapping[str, tuple[int, int]] = {
    **{f"i{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"u{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    "bool": (0, 1),
}
_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "jax.add": operator.add,
    "jax.sub": operator.sub,
    "jax.mul": operator.mul,
}
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "jax.lt": operator.lt,
    "jax.le": operator.le,
    "jax.gt": operator.gt,
    "jax.ge": operator.ge,
    "jax.eq": operator.eq,
    "jax.ne": operator.ne,
}


def known_literal(literal: Literal) -> Known | None:
    """Returns the value of a scalar constant, or None unless it is an integer."""
    return _array(literal.value) if literal.dtype in _RANGES else None


def literal_of(known: Known, dtype: str) -> Literal | None:
    """Returns a known scalar as a constant, or None if it is symbolic."""
    value = known.item()
    return None if isinstance(value, Dim) else Literal.of(value, dtype)


def evaluate(
    op_type: str, inputs: Sequence[Known], attrs: Attrs, *, dtype: str, shape: Sequence[Size]
) -> Known | None:
    """Evaluates an operator with one output on known inputs; None if it cannot be folded."""
    sizes = [size for size in shape if isinstance(size, int)]
    if dtype not in _RANGES or len(sizes) < len(shape) or np.prod(sizes) > _MOST_ELEMENTS:
        return None
    result = _evaluate(op_type, inputs, attrs, sizes)
    return result if result is not None and _fits(result, *_RANGES[dtype]) else None


def _evaluate(
    op_type: str, inputs: Sequence[Known], attrs: Attrs, shape: Sequence[int]
) -> Known | None:
    if op_type in _ARITHMETIC:
        return _array(_ARITHMETIC[op_type](*inputs))
    if op_type in _COMPARISONS:
        numbers = all(_is_numbers(array) for array in inputs)
        return _array(_COMPARISONS[op_type](*inputs)) if numbers else None
    match op_type:
        case "jax.dim_value":
            return _array(attrs["dim"])
        case "jax.iota":
            axis: Any = attrs["dimension"]
            return _array(np.indices(shape)[axis])
        case "jax.convert_element_type":
            return inputs[0]
        case "jax.select_n" if inputs[0].ndim == 0 and _is_numbers(inputs[0]):
            return inputs[1 + int(inputs[0].item())]
        case "jax.broadcast_in_dim":
            return _broadcast(inputs[0], attrs, shape)
        case "jax.reshape" | "jax.squeeze":
            return inputs[0].reshape(shape)
        case "jax.concatenate":
            along: Any = attrs["dimension"]
            return np.concatenate(list(inputs), axis=along)
        case "jax.rev":
            dims: Any = attrs["dimensions"]
            return np.flip(inputs[0], axis=dims)
    return None


def _broadcast(array: Known, attrs: Attrs, shape: Sequence[int]) -> Known:
    places: Any = attrs["broadcast_dimensions"]
    sizes = [1] * len(shape)
    for place, size in zip(places, array.shape, strict=True):
        sizes[place] = size
    return np.broadcast_to(array.reshape(sizes), shape)


def _array(value: Any) -> Known:
    return np.asarray(value, dtype=object)


def _is_numbers(array: Known) -> bool:
    return not any(isinstance(value, Dim) for value in array.ravel().tolist())


def _fits(array: Known, low: int, high: int) -> bool:
    """Whether nothing overflows; a size never does, as jax assumes too."""
    values = array.ravel().tolist()
    return all(isinstance(value, Dim) or low <= value <= high for value in values)

"""Folding of integers that are known at capture, mostly indices.

With a symbolic batch size jax emits operators for arithmetic that it otherwise does in Python:
`x[:, 1:]` gathers at an index computed by `iota`, `mul` and `add`, and its gradient is a scatter
into zeros. With known indices the gather of one window becomes a slice, and its gradient a pad,
which read better and run faster on every backend.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from jaxfleet.ir import Attrs, Dim, Literal, Operand, Size, Struct, Word, evaluate

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
_IN_BOUNDS = Word("GatherScatterMode.PROMISE_IN_BOUNDS")


def known_literal(literal: Literal) -> Known | None:
    """Returns the value of a scalar constant, or None unless it is an integer."""
    return _array(literal.value) if literal.dtype in _RANGES else None


def literal_of(known: Known, dtype: str) -> Literal | None:
    """Returns a known scalar as a constant, or None if it is symbolic."""
    value = known.item()
    return None if isinstance(value, Dim) else Literal.of(value, dtype)


def known_result(
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


@dataclass(frozen=True)
class Link:
    """One operator of a chain, each of which reads its predecessor's result."""

    op_type: str  # its type
    attrs: Attrs  # its attributes
    shape: tuple[Size, ...]  # of its result
    more: tuple[Operand, ...] = ()  # its other inputs


@dataclass(frozen=True)
class _Window:
    """A window cut out of an array."""

    whole: tuple[Size, ...]  # the array's shape
    start: tuple[Size, ...]  # first element along each axis
    sizes: tuple[Size, ...]  # number of elements
    strides: tuple[int, ...]  # distance between them
    dropped: tuple[int, ...]  # axes of size 1 that the result lacks

    @property
    def ends(self) -> tuple[Size, ...]:
        parts = zip(self.start, self.sizes, self.strides, strict=True)
        return tuple(start + (size - 1) * stride + 1 for start, size, stride in parts)

    @property
    def is_inside(self) -> bool:
        """Whether the window is in bounds for all symbolic sizes from 1 on."""
        rows = zip(self.start, self.ends, self.whole, strict=True)
        return all(_at_least_0(start) and _at_least_0(size - end) for start, end, size in rows)

    def cut(self) -> list[Link]:
        links = []
        if self.sizes != self.whole:
            attrs = Attrs({"start_indices": self.start, "limit_indices": self.ends})
            if any(stride != 1 for stride in self.strides):
                attrs = attrs.updated(strides=self.strides)
            links.append(Link("jax.slice", attrs, self.sizes))
        if self.dropped:
            kept = tuple(s for axis, s in enumerate(self.sizes) if axis not in self.dropped)
            links.append(Link("jax.squeeze", Attrs({"dimensions": self.dropped}), kept))
        return links

    def put_back(self, zero: Literal) -> list[Link]:
        """Returns the chain that pads the window with zeros to the whole array."""
        links = []
        if self.dropped:
            kept = tuple(axis for axis in range(len(self.sizes)) if axis not in self.dropped)
            attrs = Attrs({"broadcast_dimensions": kept, "shape": self.sizes})
            links.append(Link("jax.broadcast_in_dim", attrs, self.sizes))
        if self.sizes != self.whole:
            rows = zip(self.start, self.whole, self.ends, self.strides, strict=True)
            config = tuple((start, size - end, stride - 1) for start, size, end, stride in rows)
            attrs = Attrs({"padding_config": config})
            links.append(Link("jax.pad", attrs, self.whole, (zero,)))
        return links


def gather_as_slice(whole: Sequence[Size], indices: Known, attrs: Attrs) -> list[Link] | None:
    """Returns the chain equivalent to a gather, or None unless it reads one window."""
    numbers = _fields(attrs)
    if attrs["mode"] != _IN_BOUNDS or numbers["operand_batching_dims"]:
        return None
    sizes: Any = attrs["slice_sizes"]
    axes = _Axes(
        numbers["start_index_map"], numbers["collapsed_slice_dims"], numbers["offset_dims"]
    )
    window = _window(whole, indices, sizes, axes)
    return window.cut() if window is not None else None


def scatter_as_pad(
    whole: Sequence[Size], indices: Known, updates: Sequence[Size], attrs: Attrs, zero: Literal
) -> list[Link] | None:
    """Returns the chain equivalent to a scatter into zeros, or None unless it writes one window."""
    numbers = _fields(attrs)
    if attrs["mode"] != _IN_BOUNDS or numbers["operand_batching_dims"]:
        return None
    inserted, offsets = numbers["inserted_window_dims"], numbers["update_window_dims"]
    parts = iter(updates[axis] for axis in offsets)
    sizes = tuple(1 if axis in inserted else next(parts) for axis in range(len(whole)))
    axes = _Axes(numbers["scatter_dims_to_operand_dims"], inserted, offsets)
    window = _window(whole, indices, sizes, axes)
    return window.put_back(zero) if window is not None else None


def dynamic_slice_as_slice(
    whole: Sequence[Size], start: Sequence[Size], sizes: Sequence[Size]
) -> list[Link] | None:
    """Returns the chain equivalent to a `dynamic_slice`, or None if it may be out of bounds."""
    window = _Window(tuple(whole), tuple(start), tuple(sizes), (1,) * len(whole), ())
    return window.cut() if window.is_inside else None


def dynamic_update_slice_as_pad(
    whole: Sequence[Size], start: Sequence[Size], sizes: Sequence[Size], zero: Literal
) -> list[Link] | None:
    """Returns the chain for a `dynamic_update_slice` of zeros, or None if out of bounds."""
    window = _Window(tuple(whole), tuple(start), tuple(sizes), (1,) * len(whole), ())
    return window.put_back(zero) if window.is_inside else None


def _fields(attrs: Attrs) -> dict[str, Any]:
    numbers = attrs["dimension_numbers"]
    assert isinstance(numbers, Struct)
    return dict(numbers.fields)


@dataclass(frozen=True)
class _Axes:
    """Roles of the axes in a gather or scatter."""

    indexed: Sequence[int]  # the axes of the whole, in the order of the last axis of the indices
    collapsed: Sequence[int]  # axes of the whole, of size 1 in a window, that the result lacks
    offsets: Sequence[int]  # the axes of the result that are those of a window


def _window(
    whole: Sequence[Size], indices: Known, sizes: Sequence[Size], axes: _Axes
) -> _Window | None:
    """Returns the union of adjacent windows cut from `whole` if it is a window itself.

    `indices` are the starts: along each axis but the last, one number steps evenly.
    """
    if indices.size == 0:
        return None
    start: list[Size] = [0] * len(whole)
    counts, strides = list(sizes), [1] * len(whole)
    spread: dict[int, int] = {}  # axis of `indices` -> the axis of the whole along which it steps
    for column, axis in enumerate(axes.indexed):
        places = indices[..., column]
        start[axis] = places.ravel().tolist()[0]
        for along in range(places.ndim):
            steps = _steps(places, along)
            if steps == {0}:
                continue
            if len(steps) > 1 or min(steps) < 1 or axis not in axes.collapsed:
                return None
            spread[along], counts[axis], strides[axis] = axis, places.shape[along], min(steps)
    for along, count in enumerate(indices.shape[:-1]):
        free = [axis for axis in axes.collapsed if axis not in spread.values()]
        if count == 1 and free:
            spread.setdefault(along, free[0])
    dropped = tuple(axis for axis in axes.collapsed if axis not in spread.values())
    window = _Window(tuple(whole), tuple(start), tuple(counts), tuple(strides), dropped)
    kept = [axis for axis in range(len(whole)) if axis not in dropped]
    stepped = [kept.index(spread[along]) for along in sorted(spread)]
    others = [place for place in range(len(kept)) if place not in axes.offsets]
    is_whole = len(set(spread.values())) == len(spread) == indices.ndim - 1
    return window if is_whole and stepped == others else None


def _steps(places: Known, along: int) -> set[int]:
    """Returns the differences of neighbours along an axis; 0 for a single element."""
    rows = np.moveaxis(places, along, 0).reshape(places.shape[along], -1)
    steps = (rows[1:] - rows[:-1]).ravel().tolist()
    return {step if isinstance(step, int) else -1 for step in steps} or {0}  # -1: not evenly


def _at_least_0(size: Size) -> bool:
    """Whether a size is at least 0: for a sum that grows with its symbols, at their minimum."""
    if isinstance(size, int):
        return size >= 0
    grows = all(count > 0 or not factors for factors, count in size.terms)
    return grows and evaluate(size, dict.fromkeys(size.letters, 1)) >= 0

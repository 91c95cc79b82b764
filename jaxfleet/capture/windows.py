"""Writes a gather of one window as the slice that it is, and its gradient as a pad.

Under a letter `x[:, 1:]` is a gather and its gradient a scatter into zeros; under a number they
are a slice and a pad, which read better, and which every backend runs faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxfleet.capture.known import Known
from jaxfleet.ir import Attrs, Literal, Operand, Size, Struct, Word, evaluate

_IN_BOUNDS = Word("GatherScatterMode.PROMISE_IN_BOUNDS")


@dataclass(frozen=True)
class Link:
    """One operator of a chain, in which each reads what the one before it makes.

    Attributes:
        op_type: what it does.
        attrs: its attributes.
        shape: what it makes.
        more: what it reads besides.
    """

    op_type: str
    attrs: Attrs
    shape: tuple[Size, ...]
    more: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class _Window:
    """A part of an array that is cut out along each axis.

    Attributes:
        whole: the array's shape.
        start: where the part begins.
        sizes: how many elements it has.
        strides: the distance between them.
        dropped: axes of size 1 that the part is without.
    """

    whole: tuple[Size, ...]
    start: tuple[Size, ...]
    sizes: tuple[Size, ...]
    strides: tuple[int, ...]
    dropped: tuple[int, ...]

    @property
    def ends(self) -> tuple[Size, ...]:
        """The first place after the part, along each axis."""
        parts = zip(self.start, self.sizes, self.strides, strict=True)
        return tuple(start + (size - 1) * stride + 1 for start, size, stride in parts)

    @property
    def is_inside(self) -> bool:
        """Tells whether the part is within the array whatever the letters, taken as at least 1."""
        rows = zip(self.start, self.ends, self.whole, strict=True)
        return all(_at_least_0(start) and _at_least_0(size - end) for start, end, size in rows)

    def cut(self) -> list[Link]:
        """Returns the chain that makes the part of the array."""
        links = []
        if self.sizes != self.whole:
            strides = self.strides if any(stride != 1 for stride in self.strides) else None
            attrs = Attrs(
                {"start_indices": self.start, "limit_indices": self.ends, "strides": strides}
            )
            links.append(Link("jax.slice", attrs, self.sizes))
        if self.dropped:
            kept = tuple(s for axis, s in enumerate(self.sizes) if axis not in self.dropped)
            links.append(Link("jax.squeeze", Attrs({"dimensions": self.dropped}), kept))
        return links

    def put_back(self, zero: Literal) -> list[Link]:
        """Returns the chain that makes the array of the part, zeros around it."""
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
    """Returns the chain that a gather is, or None where it is not one window.

    Args:
        whole: the shape that is gathered from.
        indices: where.
        attrs: of the gather.
    """
    numbers = _fields(attrs)
    if attrs["mode"] != _IN_BOUNDS or numbers["operand_batching_dims"]:
        return None
    sizes: Any = attrs["slice_sizes"]
    dropped = numbers["collapsed_slice_dims"]
    window = _window(whole, indices, numbers["start_index_map"], sizes, dropped)
    if window is None:
        return None
    rank = len(whole) - len(window.dropped)
    between = [axis for axis in range(rank) if axis not in numbers["offset_dims"]]
    return window.cut() if _is_in_place(window, dropped, between) else None


def scatter_as_pad(
    whole: Sequence[Size], indices: Known, updates: Sequence[Size], attrs: Attrs, zero: Literal
) -> list[Link] | None:
    """Returns the chain that a scatter into zeros is, or None where it is not one window.

    Args:
        whole: the shape of the zeros.
        indices: where to scatter.
        updates: the shape of what is scattered.
        attrs: of the scatter.
        zero: the zero.
    """
    numbers = _fields(attrs)
    if attrs["mode"] != _IN_BOUNDS or numbers["operand_batching_dims"]:
        return None
    inserted, offsets = numbers["inserted_window_dims"], numbers["update_window_dims"]
    parts = iter(updates[axis] for axis in offsets)
    sizes = tuple(1 if axis in inserted else next(parts) for axis in range(len(whole)))
    window = _window(whole, indices, numbers["scatter_dims_to_operand_dims"], sizes, inserted)
    if window is None:
        return None
    between = [axis for axis in range(len(updates)) if axis not in offsets]
    return window.put_back(zero) if _is_in_place(window, inserted, between) else None


def dynamic_slice_as_slice(
    whole: Sequence[Size], start: Sequence[Size], sizes: Sequence[Size]
) -> list[Link] | None:
    """Returns the chain that a `dynamic_slice` is, or None where its place may be out of bounds."""
    window = _Window(tuple(whole), tuple(start), tuple(sizes), (1,) * len(whole), ())
    return window.cut() if window.is_inside else None


def dynamic_update_slice_as_pad(
    whole: Sequence[Size], start: Sequence[Size], sizes: Sequence[Size], zero: Literal
) -> list[Link] | None:
    """Returns the chain that a `dynamic_update_slice` of zeros is; None as above."""
    window = _Window(tuple(whole), tuple(start), tuple(sizes), (1,) * len(whole), ())
    return window.put_back(zero) if window.is_inside else None


def _fields(attrs: Attrs) -> dict[str, Any]:
    numbers = attrs["dimension_numbers"]
    assert isinstance(numbers, Struct)
    return dict(numbers.fields)


def _window(
    whole: Sequence[Size],
    indices: Known,
    index_map: Sequence[int],
    sizes: Sequence[Size],
    dropped: Sequence[int],
) -> _Window | None:
    """Returns the window that starts at one index, or at evenly spaced ones along one axis."""
    start: list[Size] = [0] * len(whole)
    strides = [1] * len(whole)
    if indices.ndim == 1:
        for axis, index in zip(index_map, indices, strict=True):
            start[axis] = index
        return _Window(tuple(whole), tuple(start), tuple(sizes), tuple(strides), tuple(dropped))
    places = indices.ravel().tolist()
    if indices.ndim != 2 or len(index_map) != 1 or tuple(dropped) != tuple(index_map):
        return None
    stride = places[1] - places[0] if len(places) > 1 else 1
    even = [places[0] + stride * i for i in range(len(places))]
    if not isinstance(stride, int) or stride < 1 or places != even:
        return None
    axis = index_map[0]
    start[axis], strides[axis] = places[0], stride
    counts = [len(places) if i == axis else size for i, size in enumerate(sizes)]
    return _Window(tuple(whole), tuple(start), tuple(counts), tuple(strides), ())


def _is_in_place(window: _Window, dropped: Sequence[int], between: Sequence[int]) -> bool:
    """Tells whether evenly spaced windows come out along the axis that they were taken from."""
    return list(between) == ([] if window.dropped == tuple(dropped) else list(dropped))


def _at_least_0(size: Size) -> bool:
    """Tells whether a size is at least 0: a sum that grows with its letters, by its least value."""
    if isinstance(size, int):
        return size >= 0
    grows = all(count > 0 or not factors for factors, count in size.terms)
    return grows and evaluate(size, dict.fromkeys(size.letters, 1)) >= 0

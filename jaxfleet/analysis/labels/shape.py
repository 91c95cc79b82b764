"""Rules for operators that move axes: the cut axis is followed to where it goes."""

from collections.abc import Callable, Sequence
from math import prod

from jaxfleet.analysis.labels.label import (
    Placing,
    View,
    along,
    as_ints,
    gathered,
    local_sizes,
    settle,
    sharded,
)
from jaxfleet.ir import Size


def broadcast(view: View) -> Placing:
    """Follows the cut axis; a new axis that grows with the batch is made cut."""
    mesh, shape = view.mesh, view.out_shapes[0]
    kept = view.ints("broadcast_dimensions")
    label, axis = view.labels[0], view.axis(0)
    if axis is not None:
        out = kept[axis]
        return along(view, (label,), sharded(out), shape=local_sizes(view, shape, out))
    grown = [
        place
        for place in range(len(shape))
        if place not in kept or view.shapes[0][kept.index(place)] != shape[place]
    ]
    has_batch = any(mesh.has_letter(size) for size in view.shapes[0])
    new = None if has_batch else mesh.batch_axis(shape, among=grown)
    if new is not None:
        sizes = local_sizes(view, shape, new)
        return along(view, (settle(label),), sharded(new), shape=sizes)
    kept_label = label if label.is_sum else settle(label)
    return along(view, (kept_label,), kept_label)


def iota(view: View) -> Placing:
    """Counts this device's rows where the counted axis is the cut one."""
    shape = view.out_shapes[0]
    axis = view.mesh.batch_axis(shape)
    if axis is None:
        return along(view, (), view.settled)
    placing = along(view, (), sharded(axis), shape=local_sizes(view, shape, axis))
    if view.op.attrs["dimension"] != axis:
        return placing
    return Placing(placing.inputs, placing.outputs, placing.attrs, op_type="c_iota")


def reshape(view: View) -> Placing:
    """Follows the cut axis where it stays the slowest of the axes it is merged with."""
    label, shape = view.labels[0], view.out_shapes[0]
    axis = view.axis(0)
    if axis is None:
        kept = label if label.is_sum else settle(label)
        return along(view, (kept,), kept)
    out = _same_rows(view, view.shapes[0], axis, shape)
    if out is None:
        return gathered(view, "the reshape merges the batch into a faster axis")
    return along(view, (label,), sharded(out), new_sizes=local_sizes(view, shape, out))


def transpose(view: View) -> Placing:
    """Follows the cut axis through the permutation."""
    return _moved(view, lambda axis: view.ints("permutation").index(axis))


def squeeze(view: View) -> Placing:
    """Follows the cut axis past the ones that go away."""
    gone = view.ints("dimensions")
    return _moved(view, lambda axis: axis - sum(place < axis for place in gone))


def unmoved(view: View) -> Placing:
    """Works on other axes than the cut one: `rev`, `cumsum`, `sort`, `pad`, ..."""
    touched = touched_axes(view)
    cut = {label.axis for label in view.labels if label.is_sharded}
    if not cut:
        inputs = tuple(settle(label) for label in view.labels)
        return along(view, inputs, *[view.settled] * len(view.out_shapes))
    axis = cut.pop()
    if cut or axis in touched:
        return gathered(view, f"{view.op.type} works along the batch axis")
    rank = len(view.out_shapes[0])
    inputs = tuple(
        sharded(axis) if len(shape) == rank else settle(label)
        for shape, label in zip(view.shapes, view.labels, strict=True)
    )
    return along(view, inputs, *[sharded(axis)] * len(view.out_shapes))


def unmoved_linear(view: View) -> Placing:
    """As `unmoved`, and linear in its first input: `rev`, `cumsum`."""
    if view.labels[0].is_sum:
        rest = tuple(settle(label) for label in view.labels[1:])
        return along(view, (view.labels[0], *rest), *[view.labels[0]] * len(view.out_shapes))
    return unmoved(view)


def touched_axes(view: View) -> set[int]:
    """Returns the axes along which an operator mixes elements."""
    attrs, rank = view.op.attrs, len(view.shapes[0])
    match view.op.type.removeprefix("jax."):
        case "rev":
            return set(view.ints("dimensions"))
        case "sort":
            return {int(str(attrs["dimension"]))}
        case "top_k" | "approx_top_k":
            return {int(str(attrs.get("axis", rank - 1))) % rank}
        case "pad":
            config = attrs["padding_config"]
            assert isinstance(config, tuple)
            return {place for place, edges in enumerate(config) if any(as_ints(edges))}
        case "fft":
            return set(range(rank - len(view.ints("fft_lengths")), rank))
        case "split" | "cumsum" | "cumprod" | "cummax" | "cummin" | "cumlogsumexp":
            return {int(str(attrs["axis"]))}
        case "reduce_window" | "reduce_window_sum" | "reduce_window_max" | "reduce_window_min":
            return _windowed(view)
        case "select_and_scatter_add" | "select_and_gather_add" | "select_and_scatter":
            return _windowed(view)
    return {rank - 1, rank - 2}  # linear algebra: the last two axes are a matrix


def concatenate(view: View) -> Placing:
    """Joins along another axis than the cut one, or on every device whole."""
    dimension = int(str(view.op.attrs["dimension"]))
    cut = next((label.axis for label in view.labels if label.is_sharded), None)
    if cut is None:
        if all(label.is_sum for label in view.labels):
            return along(view, view.labels, view.labels[0])
        inputs = tuple(settle(label) for label in view.labels)
        return along(view, inputs, view.settled)
    if cut == dimension:
        return gathered(view, "rows are joined along the batch axis")
    return along(view, (sharded(cut),) * len(view.labels), sharded(cut))


def stack(view: View) -> Placing:
    """Stacks along a new axis."""
    place = int(str(view.op.attrs["axis"]))
    cut = next((label.axis for label in view.labels if label.is_sharded), None)
    if cut is None:
        inputs = tuple(settle(label) for label in view.labels)
        return along(view, inputs, view.settled)
    out = cut + (place <= cut)
    return along(view, (sharded(cut),) * len(view.labels), sharded(out))


def _moved(view: View, follow: Callable[[int], int]) -> Placing:
    label, axis = view.labels[0], view.axis(0)
    if axis is not None:
        return along(view, (label,), sharded(follow(axis)))
    kept = label if label.is_sum else settle(label)
    return along(view, (kept,), kept)


def _same_rows(
    view: View, shape: Sequence[Size], axis: int, out: Sequence[Size]
) -> int | None:
    """Returns the axis of `out` that cuts the same elements as `axis` cuts of `shape`."""
    before = prod(shape[:axis], start=1)
    for place in range(len(out)):
        if prod(out[:place], start=1) != before:
            continue
        if view.mesh.part(out[place]) is not None and out[place] != 1:
            return place
    return None


def _windowed(view: View) -> set[int]:
    """Returns the axes along which a window is wider than one element, moves or pads."""
    window, strides = view.ints("window_dimensions"), view.ints("window_strides")
    padding = view.op.attrs["padding"]
    assert isinstance(padding, tuple)
    return {
        place
        for place, size in enumerate(window)
        if size != 1 or strides[place] != 1 or any(as_ints(padding[place]))
    }

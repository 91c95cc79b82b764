"""Rules for operators that move axes: the cut axis is followed to where it goes."""

from collections.abc import Callable, Sequence
from math import prod

from jaxfleet.analysis.labels.label import SUM, settle, sharded
from jaxfleet.analysis.labels.placing import (
    Placing,
    View,
    along,
    as_ints,
    gathered,
    local_sizes,
    whole,
)
from jaxfleet.ir import Size


def broadcast(view: View) -> Placing:
    """Follows the cut axis; a new axis that grows with the batch is made cut."""
    shape, label = view.out_shapes[0], view.labels[0]
    kept, axis = view.ints("broadcast_dimensions"), view.axis(0)
    if axis is not None:
        out = kept[axis]
        return along(view, (label,), sharded(out), shape=local_sizes(view, shape, out))
    has_batch = any(view.mesh.has_letter(size) for size in view.shapes[0])
    new = None if has_batch else view.mesh.batch_axis(shape, among=grown_axes(view))
    if new is not None:
        sizes = local_sizes(view, shape, new)
        return along(view, (settle(label),), sharded(new), shape=sizes)
    return whole(view) if view.completes else _kept(view)


def grown_axes(view: View) -> list[int]:
    """Returns the axes of a broadcast's result along which all elements are the same."""
    kept = dict(zip(view.ints("broadcast_dimensions"), view.shapes[0], strict=True))
    return [axis for axis, size in enumerate(view.out_shapes[0]) if kept.get(axis) != size]


def iota(view: View) -> Placing:
    """Counts this device's rows where the counted axis is the cut one."""
    shape = view.out_shapes[0]
    axis = view.mesh.batch_axis(shape)
    if axis is None:
        return whole(view)
    return counted(view, axis)


def counted(view: View, axis: int) -> Placing:
    """Counts a device's part of an axis."""
    sizes = local_sizes(view, view.out_shapes[0], axis)
    placing = along(view, (), sharded(axis), shape=sizes)
    if view.number("dimension") != axis:
        return placing
    return Placing(placing.inputs, placing.outputs, placing.attrs, op_type="c_iota")


def reshape(view: View) -> Placing:
    """Follows the cut axis where it stays the slowest of the axes it is merged with."""
    shape, axis = view.out_shapes[0], view.axis(0)
    if axis is None:
        return _kept(view)
    order = view.op.attrs.get("dimensions")
    places = as_ints(order) if order is not None else tuple(range(len(view.shapes[0])))
    moved = [view.shapes[0][place] for place in places]
    out = _same_rows(view, moved, places.index(axis), shape)
    if out is None:
        return gathered(view, "the reshape merges the batch into a faster axis")
    return along(view, view.labels, sharded(out), new_sizes=local_sizes(view, shape, out))


def transpose(view: View) -> Placing:
    """Follows the cut axis through the permutation."""
    return _moved(view, lambda axis: view.ints("permutation").index(axis))


def squeeze(view: View) -> Placing:
    """Follows the cut axis past the ones that go away."""
    gone = view.ints("dimensions")
    if view.axis(0) in gone:  # a single row, on a single device
        return whole(view)
    return _moved(view, lambda axis: axis - sum(place < axis for place in gone))


def concatenate(view: View) -> Placing:
    """Joins along another axis than the cut one, or on every device whole."""
    cut = next((label.axis for label in view.labels if label.is_sharded), None)
    if cut is None:
        return _all_sums(view)
    if cut == view.number("dimension"):
        return gathered(view, "rows are joined along the batch axis")
    return along(view, (sharded(cut),) * len(view.labels), sharded(cut))


def stack(view: View) -> Placing:
    """Stacks along a new axis."""
    cut = next((label.axis for label in view.labels if label.is_sharded), None)
    if cut is None:
        return _all_sums(view)
    out = cut + (view.number("axis") <= cut)
    return along(view, (sharded(cut),) * len(view.labels), sharded(out))


def unstack(view: View) -> Placing:
    """Takes an axis apart: another than the cut one, or on every device whole."""
    place, count, axis = view.number("axis"), len(view.out_shapes), view.axis(0)
    if axis is None:
        return along(view, (SUM,), *[SUM] * count) if view.labels[0].is_sum else whole(view)
    if axis == place:
        return gathered(view, "the rows of the batch are taken apart")
    return along(view, view.labels, *[sharded(axis - (place < axis))] * count)


def _all_sums(view: View) -> Placing:
    parts = [label.is_sum or place in view.zeros for place, label in enumerate(view.labels)]
    if SUM in view.labels and all(parts):
        return along(view, (SUM,) * len(parts), SUM)
    return whole(view)


def _moved(view: View, follow: Callable[[int], int]) -> Placing:
    axis = view.axis(0)
    if axis is None:
        return _kept(view)
    return along(view, view.labels, sharded(follow(axis)))


def _kept(view: View) -> Placing:
    """Keeps a summand a summand; anything else is complete."""
    return along(view, view.labels, view.labels[0]) if view.labels[0].is_sum else whole(view)


def _same_rows(view: View, shape: Sequence[Size], axis: int, out: Sequence[Size]) -> int | None:
    """Returns the axis of `out` that cuts the same elements as `axis` cuts of `shape`."""
    before = prod(shape[:axis], start=1)
    for place in range(len(out)):
        if prod(out[:place], start=1) != before:
            continue
        if view.mesh.part(out[place]) is not None and out[place] != 1:
            return place
    return None

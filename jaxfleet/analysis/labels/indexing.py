"""Rules for operators that slice, at places that are known or computed."""

from jaxfleet.analysis.labels.label import SUM, settle, sharded
from jaxfleet.analysis.labels.placing import (
    Placing,
    View,
    along,
    as_sizes,
    gathered,
    local_sizes,
    whole,
)


def static_slice(view: View) -> Placing:
    """Keeps rows where the slice takes all of the cut axis."""
    axis, attrs = view.axis(0), view.op.attrs
    if axis is None:
        return along(view, (SUM,), SUM) if view.labels[0].is_sum else whole(view)
    size = view.shapes[0][axis]
    starts, limits = as_sizes(attrs["start_indices"]), as_sizes(attrs["limit_indices"])
    strides = attrs.get("strides")
    stride = strides[axis] if isinstance(strides, tuple) else 1
    if (starts[axis], limits[axis], stride) != (0, size, 1):
        return gathered(view, "the slice takes some rows of the batch")
    ends = view.mesh.local_shape(limits, sharded(axis))
    return along(view, view.labels, sharded(axis), limit_indices=ends)


def dynamic_slice(view: View) -> Placing:
    """Keeps rows where the slice takes all of the cut axis."""
    axis = view.axis(0)
    indices = [settle(label) for label in view.labels[1:]]
    if axis is None:
        return along(view, (SUM, *indices), SUM) if view.labels[0].is_sum else whole(view)
    if view.out_shapes[0][axis] != view.shapes[0][axis]:
        return gathered(view, "the slice takes some rows of the batch")
    sizes = local_sizes(view, view.out_shapes[0], axis)
    return along(view, (view.labels[0], *indices), sharded(axis), slice_sizes=sizes)


def dynamic_update_slice(view: View) -> Placing:
    """Keeps rows where the update covers all of the cut axis."""
    axis = view.axis(0) if view.axis(0) is not None else view.axis(1)
    indices = [settle(label) for label in view.labels[2:]]
    if axis is None:
        are_sums = SUM in view.labels[:2]
        return along(view, (SUM, SUM, *indices), SUM) if are_sums else whole(view)
    if view.shapes[1][axis] != view.shapes[0][axis]:
        return gathered(view, "the update writes some rows of the batch")
    return along(view, (sharded(axis), sharded(axis), *indices), sharded(axis))

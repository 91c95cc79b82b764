"""Rules for operators that pick or place elements by index."""

from collections.abc import Sequence

from jaxfleet.analysis.labels.label import (
    SUM,
    Label,
    Placing,
    View,
    along,
    as_ints,
    gathered,
    local_sizes,
    settle,
    sharded,
)
from jaxfleet.ir import Size, Struct


def static_slice(view: View) -> Placing:
    """Keeps rows where the slice takes all of the cut axis."""
    label, axis = view.labels[0], view.axis(0)
    if axis is None:
        kept = label if label.is_sum else settle(label)
        return along(view, (kept,), kept)
    size = view.shapes[0][axis]
    limits, starts = view.op.attrs["limit_indices"], view.op.attrs["start_indices"]
    strides = view.op.attrs.get("strides")
    assert isinstance(limits, tuple)
    assert isinstance(starts, tuple)
    stride = strides[axis] if isinstance(strides, tuple) else 1
    if (starts[axis], limits[axis], stride) != (0, size, 1):
        return gathered(view, "the slice takes some rows of the batch")
    ends = [view.mesh.full(limit) for limit in limits if isinstance(limit, Size)]
    ends[axis] = view.mesh.local_shape((size,), sharded(0))[0]
    return along(view, (label,), sharded(axis), limit_indices=tuple(ends))


def dynamic_slice(view: View) -> Placing:
    """Keeps rows where the slice takes all of the cut axis."""
    label, axis = view.labels[0], view.axis(0)
    indices = [settle(label) for label in view.labels[1:]]
    if axis is None:
        kept = label if label.is_sum else settle(label)
        return along(view, (kept, *indices), kept)
    if view.out_shapes[0][axis] != view.shapes[0][axis]:
        return gathered(view, "the slice takes some rows of the batch")
    sizes = local_sizes(view, view.out_shapes[0], axis)
    return along(view, (label, *indices), sharded(axis), slice_sizes=sizes)


def dynamic_update_slice(view: View) -> Placing:
    """Keeps rows where the update covers all of the cut axis."""
    axis = view.axis(0) if view.axis(0) is not None else view.axis(1)
    indices = [settle(label) for label in view.labels[2:]]
    if axis is None:
        if SUM in view.labels[:2]:
            return along(view, (SUM, SUM, *indices), SUM)
        kept = [settle(label) for label in view.labels[:2]]
        return along(view, (*kept, *indices), view.settled)
    if view.shapes[1][axis] != view.shapes[0][axis]:
        return gathered(view, "the update writes some rows of the batch")
    return along(view, (sharded(axis), sharded(axis), *indices), sharded(axis))


def gather(view: View) -> Placing:
    """Looks rows of indices up in a table that every device has, or slices that span the cut."""
    dims = _dims(view)
    operand, indices = view.axis(0), view.axis(1)
    out_batch = _batch_axes(view.out_shapes[0], as_ints(dims.fields["offset_dims"]))
    kept = settle(view.labels[0])
    if operand is None and indices is None:
        if view.labels[0].is_sum:
            return along(view, (SUM, settle(view.labels[1])), SUM)
        return along(view, (kept, settle(view.labels[1])), view.settled)
    paired = dict(
        zip(
            as_ints(dims.fields["operand_batching_dims"]),
            as_ints(dims.fields["start_indices_batching_dims"]),
            strict=True,
        )
    )
    if operand in paired or indices in paired.values():
        axis = operand if operand in paired else next(k for k, v in paired.items() if v == indices)
        assert axis is not None
        inputs = (sharded(axis), sharded(paired[axis]))
        return along(view, inputs, sharded(out_batch[paired[axis]]))
    if operand is not None and (place := _whole_offset(view, dims, operand)) is not None:
        sizes = view.op.attrs["slice_sizes"]
        assert isinstance(sizes, tuple)
        full = [view.mesh.full(size) for size in sizes if isinstance(size, Size)]
        full[operand] = view.mesh.local_shape((view.shapes[0][operand],), sharded(0))[0]
        inputs = (view.labels[0], settle(view.labels[1]))
        return along(view, inputs, sharded(place), slice_sizes=tuple(full))
    if indices is not None:
        note = "the look-up reads rows of the batch by their number" if operand is not None else ""
        placing = along(view, (kept, view.labels[1]), sharded(out_batch[indices]))
        return Placing(placing.inputs, placing.outputs, placing.attrs, note=note)
    return gathered(view, "the look-up reads rows of the batch by their number")


def scatter_add(view: View) -> Placing:
    """Adds rows of updates to a table: each device has a summand of the table."""
    dims = _dims(view)
    paired = dict(
        zip(
            as_ints(dims.fields["operand_batching_dims"]),
            as_ints(dims.fields["scatter_indices_batching_dims"]),
            strict=True,
        )
    )
    windows = as_ints(dims.fields["update_window_dims"])
    update_batch = _batch_axes(view.shapes[2], windows)
    axes = [view.axis(place) for place in range(3)]
    if axes == [None, None, None]:
        if SUM in (view.labels[0], view.labels[2]):
            return along(view, (SUM, settle(view.labels[1]), SUM), SUM)
        return along(view, tuple(settle(label) for label in view.labels), view.settled)
    batched = _paired_axis(axes, paired, update_batch)
    if batched is not None:
        index = paired[batched]
        inputs = (sharded(batched), sharded(index), sharded(update_batch[index]))
        return along(view, inputs, sharded(batched))
    spanned = _spanned_axis(view, dims, axes, windows)
    if spanned is not None:
        operand, update = spanned
        inputs = (sharded(operand), settle(view.labels[1]), sharded(update))
        return along(view, inputs, sharded(operand))
    index = axes[1] if axes[1] is not None else _index_axis(axes[2], update_batch)
    if index is None or view.mesh.part(view.shapes[1][index]) is None:
        return gathered(view, "the scatter writes rows of the batch by their number")
    note = "the scatter writes rows of the batch by their number" if axes[0] is not None else ""
    placing = along(view, (SUM, sharded(index), sharded(update_batch[index])), SUM)
    return Placing(placing.inputs, placing.outputs, placing.attrs, note=note)


def scatter(view: View) -> Placing:
    """Writes rows in place where operand, indices and updates are rows of one batch."""
    placing = scatter_add(view)
    if any(label.is_sum for label in (*placing.inputs, *placing.outputs)):
        return gathered(view, f"{view.op.type} writes rows by their number")
    return placing


def _dims(view: View) -> Struct:
    dims = view.op.attrs["dimension_numbers"]
    assert isinstance(dims, Struct)
    return dims


def _batch_axes(shape: Sequence[Size], offsets: Sequence[int]) -> list[int]:
    """Returns the axes of a result that come from the indices, in their order."""
    return [axis for axis in range(len(shape)) if axis not in offsets]


def _whole_offset(view: View, dims: Struct, axis: int) -> int | None:
    """Returns where an operand's axis that every slice takes whole ends up in the result."""
    gone = (
        *as_ints(dims.fields["collapsed_slice_dims"]),
        *as_ints(dims.fields["operand_batching_dims"]),
    )
    sizes = view.op.attrs["slice_sizes"]
    assert isinstance(sizes, tuple)
    if axis in gone or sizes[axis] != view.shapes[0][axis]:
        return None
    kept = [place for place in range(len(view.shapes[0])) if place not in gone]
    return as_ints(dims.fields["offset_dims"])[kept.index(axis)]


def _paired_axis(
    axes: Sequence[int | None], paired: dict[int, int], update_batch: Sequence[int]
) -> int | None:
    """Returns the operand's batching axis that any of the three is cut along."""
    for operand, index in paired.items():
        if axes[0] == operand or axes[1] == index or axes[2] == update_batch[index]:
            return operand
    return None


def _spanned_axis(
    view: View, dims: Struct, axes: Sequence[int | None], windows: Sequence[int]
) -> tuple[int, int] | None:
    """Returns an operand's axis that updates span whole and are cut along, and the update's."""
    gone = (
        *as_ints(dims.fields["inserted_window_dims"]),
        *as_ints(dims.fields["operand_batching_dims"]),
    )
    kept = [place for place in range(len(view.shapes[0])) if place not in gone]
    for operand, update in zip(kept, windows, strict=True):
        whole = view.shapes[0][operand] == view.shapes[2][update]
        if whole and (axes[0] == operand or axes[2] == update):
            return operand, update
    return None


def _index_axis(update: int | None, update_batch: Sequence[int]) -> int | None:
    return update_batch.index(update) if update in update_batch else None

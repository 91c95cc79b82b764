"""Sharding rules for slices, gather and scatter, and table look-ups.

Axes of gather and scatter have jax's names. Every axis of the indices except the last, which holds
the components of an index, is an axis of the result (of the updates, for a scatter); so are the
axes that every slice takes (every update covers) whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxfleet.analysis.sharding.plan import (
    OperatorSharding,
    OperatorView,
    along,
    as_ints,
    as_sizes,
    gathered,
    local_sizes,
    whole,
)
from jaxfleet.analysis.sharding.spec import SUM, completed, sharded
from jaxfleet.ir import Size, Struct


def static_slice(view: OperatorView) -> OperatorSharding:
    """Keeps rows if the slice takes all of the cut axis."""
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


def dynamic_slice(view: OperatorView) -> OperatorSharding:
    """Keeps rows if the slice takes all of the cut axis."""
    axis = view.axis(0)
    indices = [completed(label) for label in view.labels[1:]]
    if axis is None:
        return along(view, (SUM, *indices), SUM) if view.labels[0].is_sum else whole(view)
    if view.out_shapes[0][axis] != view.shapes[0][axis]:
        return gathered(view, "the slice takes some rows of the batch")
    sizes = local_sizes(view, view.out_shapes[0], axis)
    return along(view, (view.labels[0], *indices), sharded(axis), slice_sizes=sizes)


def dynamic_update_slice(view: OperatorView) -> OperatorSharding:
    """Keeps rows if the update covers all of the cut axis."""
    axis = view.axis(0) if view.axis(0) is not None else view.axis(1)
    indices = [completed(label) for label in view.labels[2:]]
    if axis is None:
        are_sums = SUM in view.labels[:2]
        return along(view, (SUM, SUM, *indices), SUM) if are_sums else whole(view)
    if view.shapes[1][axis] != view.shapes[0][axis]:
        return gathered(view, "the update writes some rows of the batch")
    return along(view, (sharded(axis), sharded(axis), *indices), sharded(axis))


@dataclass(frozen=True)
class _Axes:
    """The corresponding axes of a table, of indices and of slices."""

    paired: Mapping[int, int]  # a batching axis of the table to the indices' axis
    sliced: Mapping[int, int]  # an axis of the table to the slices' axis
    outer: Sequence[int]  # an axis of the indices to the slices' axis


def gather(view: OperatorView) -> OperatorSharding:
    """Looks up rows of indices in a replicated table, or slices that span the cut."""
    names = ("operand_batching_dims", "start_indices_batching_dims")
    axes = _axes(view, (*names, "collapsed_slice_dims", "offset_dims"), view.out_shapes[0])
    table, index = view.axis(0), view.axis(1)
    if table is None and index is None:
        if view.labels[0].is_sum:
            return along(view, (SUM, completed(view.labels[1])), SUM)
        return whole(view)
    pair = next(((k, v) for k, v in axes.paired.items() if k == table or v == index), None)
    if pair is not None:
        inputs = (sharded(pair[0]), sharded(pair[1]))
        return along(view, inputs, sharded(axes.outer[pair[1]]))
    sizes = as_sizes(view.op.attrs["slice_sizes"])
    if table is not None and table in axes.sliced and sizes[table] == view.shapes[0][table]:
        local = view.mesh.local_shape(sizes, sharded(table))
        inputs = (view.labels[0], completed(view.labels[1]))
        placing = along(view, inputs, sharded(axes.sliced[table]), slice_sizes=local)
        return placing.noting(_BY_NUMBER) if index is not None else placing
    if index is not None and index < len(axes.outer):
        inputs = (completed(view.labels[0]), view.labels[1])
        placing = along(view, inputs, sharded(axes.outer[index]))
        return placing.noting(_BY_NUMBER) if table is not None else placing
    return gathered(view, _BY_NUMBER)


def scatter_add(view: OperatorView) -> OperatorSharding:
    """Adds rows of updates to a table: each device has a summand of the table."""
    axes = _scatter_axes(view)
    if not view.has_rows:
        if SUM in (view.labels[0], view.labels[2]):
            return along(view, (SUM, completed(view.labels[1]), SUM), SUM)
        return whole(view)
    kept = _rows_of_table(view, axes)
    if kept is not None:
        return kept
    index = view.axis(1)
    if index is None and view.axis(2) in axes.outer:
        index = axes.outer.index(view.axis(2))
    if index is None or index >= len(axes.outer):
        return gathered(view, _WRITES)
    placing = along(view, (SUM, sharded(index), sharded(axes.outer[index])), SUM)
    return placing.noting(_WRITES) if view.axis(0) is not None else placing


def scatter(view: OperatorView) -> OperatorSharding:
    """Writes rows in place if table, indices and updates are rows of one batch."""
    kept = _rows_of_table(view, _scatter_axes(view)) if view.has_rows else None
    return kept if kept is not None else gathered(view, _WRITES)


def _rows_of_table(view: OperatorView, axes: _Axes) -> OperatorSharding | None:
    """Shards a scatter whose table stays cut, or returns None."""
    table, index, update = (view.axis(place) for place in range(3))
    for own, other in axes.paired.items():
        third = axes.outer[other]
        if table == own or index == other or update == third:
            return along(view, (sharded(own), sharded(other), sharded(third)), sharded(own))
    for own, third in axes.sliced.items():
        if view.shapes[0][own] != view.shapes[2][third]:
            continue
        if table == own or update == third:
            inputs = (sharded(own), completed(view.labels[1]), sharded(third))
            placing = along(view, inputs, sharded(own))
            return placing.noting(_WRITES) if index is not None else placing
    return None


def _scatter_axes(view: OperatorView) -> _Axes:
    names = ("operand_batching_dims", "scatter_indices_batching_dims")
    return _axes(view, (*names, "inserted_window_dims", "update_window_dims"), view.shapes[2])


def _axes(view: OperatorView, names: Sequence[str], slices: Sequence[Size]) -> _Axes:
    dims = view.op.attrs["dimension_numbers"]
    assert isinstance(dims, Struct)
    own, others, gone, windows = (as_ints(dims.fields[name]) for name in names)
    left = [axis for axis in range(len(view.shapes[0])) if axis not in (*gone, *own)]
    outer = [axis for axis in range(len(slices)) if axis not in windows]
    paired, sliced = dict(zip(own, others, strict=True)), dict(zip(left, windows, strict=True))
    return _Axes(paired, sliced, outer)


_BY_NUMBER = "the look-up reads rows of the batch by their number"
_WRITES = "the scatter writes rows of the batch by their number"


def lookup(view: OperatorView) -> OperatorSharding:
    """Looks up each device's own keys."""
    handle, keys = completed(view.labels[0]), view.labels[1]
    if not keys.is_sharded:
        return whole(view)
    return along(view, (handle, keys), keys)


def lookup_grad(view: OperatorView) -> OperatorSharding:
    """Makes a summand of the rows' gradient from each device's own keys.

    `summed` records this for the operator that makes rows of it: the handle's own gradient is 0
    either way.
    """
    keys, gradient = view.labels
    if keys.is_sharded:
        return along(view, (keys, keys), SUM, summed=True)
    if gradient.is_sum:
        return along(view, (completed(keys), SUM), SUM, summed=True)
    return gathered(view, "the keys are not cut, so every device needs all rows of the gradient")


def rows(view: OperatorView) -> OperatorSharding:
    """Takes the rows of each device's own part of the index."""
    index = view.labels[1]
    if not index.is_sharded:
        return whole(view)
    return along(view, (completed(view.labels[0]), index), index)


def rows_grad(view: OperatorView) -> OperatorSharding:
    """Makes a summand of the rows from each device's part of the index."""
    index, gradient = view.labels
    if index.is_sharded:
        return along(view, (index, index), SUM)
    if gradient.is_sum:
        return along(view, (completed(index), SUM), SUM)
    return gathered(view, "the index is not cut, so every device needs all rows of the gradient")


TABLE_RULES = {
    "table_lookup": lookup,
    "table_lookup_grad": lookup_grad,
    "lookup_rows": rows,
    "lookup_rows_grad": rows_grad,
}

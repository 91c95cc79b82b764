"""Rules for gather and scatter: rows are looked up in tables, and added to them.

Axes are named as jax names them. An axis of the indices, but for the last, which holds the parts
of an index, is an axis of the result (of the updates, for a scatter); so are the axes that every
slice takes (every update covers) whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxfleet.analysis.labels.label import SUM, settle, sharded
from jaxfleet.analysis.labels.placing import (
    Placing,
    View,
    along,
    as_ints,
    as_sizes,
    gathered,
    whole,
)
from jaxfleet.ir import Size, Struct


@dataclass(frozen=True)
class _Axes:
    """Which axes of a table, of indices and of slices belong together.

    Attributes:
        paired: a batching axis of the table to the indices' axis.
        sliced: an axis of the table to the slices' axis.
        outer: an axis of the indices to the slices' axis.
    """

    paired: Mapping[int, int]
    sliced: Mapping[int, int]
    outer: Sequence[int]


def gather(view: View) -> Placing:
    """Looks rows of indices up in a table that every device has, or slices that span the cut."""
    names = ("operand_batching_dims", "start_indices_batching_dims")
    axes = _axes(view, (*names, "collapsed_slice_dims", "offset_dims"), view.out_shapes[0])
    table, index = view.axis(0), view.axis(1)
    if table is None and index is None:
        if view.labels[0].is_sum:
            return along(view, (SUM, settle(view.labels[1])), SUM)
        return whole(view)
    pair = next(((k, v) for k, v in axes.paired.items() if k == table or v == index), None)
    if pair is not None:
        inputs = (sharded(pair[0]), sharded(pair[1]))
        return along(view, inputs, sharded(axes.outer[pair[1]]))
    sizes = as_sizes(view.op.attrs["slice_sizes"])
    if table is not None and table in axes.sliced and sizes[table] == view.shapes[0][table]:
        local = view.mesh.local_shape(sizes, sharded(table))
        inputs = (view.labels[0], settle(view.labels[1]))
        placing = along(view, inputs, sharded(axes.sliced[table]), slice_sizes=local)
        return placing.noting(_BY_NUMBER) if index is not None else placing
    if index is not None and index < len(axes.outer):
        inputs = (settle(view.labels[0]), view.labels[1])
        placing = along(view, inputs, sharded(axes.outer[index]))
        return placing.noting(_BY_NUMBER) if table is not None else placing
    return gathered(view, _BY_NUMBER)


def scatter_add(view: View) -> Placing:
    """Adds rows of updates to a table: each device has a summand of the table."""
    axes = _scatter_axes(view)
    if not view.has_rows:
        if SUM in (view.labels[0], view.labels[2]):
            return along(view, (SUM, settle(view.labels[1]), SUM), SUM)
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


def scatter(view: View) -> Placing:
    """Writes rows in place where table, indices and updates are rows of one batch."""
    kept = _rows_of_table(view, _scatter_axes(view)) if view.has_rows else None
    return kept if kept is not None else gathered(view, _WRITES)


def _rows_of_table(view: View, axes: _Axes) -> Placing | None:
    """Returns how a scatter runs whose table stays cut, or None."""
    table, index, update = (view.axis(place) for place in range(3))
    for own, other in axes.paired.items():
        third = axes.outer[other]
        if table == own or index == other or update == third:
            return along(view, (sharded(own), sharded(other), sharded(third)), sharded(own))
    for own, third in axes.sliced.items():
        if view.shapes[0][own] != view.shapes[2][third]:
            continue
        if table == own or update == third:
            inputs = (sharded(own), settle(view.labels[1]), sharded(third))
            placing = along(view, inputs, sharded(own))
            return placing.noting(_WRITES) if index is not None else placing
    return None


def _scatter_axes(view: View) -> _Axes:
    names = ("operand_batching_dims", "scatter_indices_batching_dims")
    return _axes(view, (*names, "inserted_window_dims", "update_window_dims"), view.shapes[2])


def _axes(view: View, names: Sequence[str], slices: Sequence[Size]) -> _Axes:
    dims = view.op.attrs["dimension_numbers"]
    assert isinstance(dims, Struct)
    own, others, gone, windows = (as_ints(dims.fields[name]) for name in names)
    left = [axis for axis in range(len(view.shapes[0])) if axis not in (*gone, *own)]
    outer = [axis for axis in range(len(slices)) if axis not in windows]
    paired, sliced = dict(zip(own, others, strict=True)), dict(zip(left, windows, strict=True))
    return _Axes(paired, sliced, outer)


_BY_NUMBER = "the look-up reads rows of the batch by their number"
_WRITES = "the scatter writes rows of the batch by their number"

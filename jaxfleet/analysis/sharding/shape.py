"""Sharding rules for operators that move axes, mix elements along some, or make arrays.

With jax's counter-based generator (threefry, partitionable) the bits of a row depend only on the
key and the row's number, so each device draws its own rows of one device's draw. Any other
generator gets a key for each device, and the numbers differ from those of one device.
"""

from collections.abc import Callable, Sequence
from math import prod

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
from jaxfleet.analysis.sharding.spec import REPLICATED, SUM, VARYING, Sharding, completed, sharded
from jaxfleet.ir import Size


def broadcast(view: OperatorView) -> OperatorSharding:
    """Follows the cut axis; a new axis that grows with the batch is made cut."""
    shape, label = view.out_shapes[0], view.labels[0]
    kept, axis = view.ints("broadcast_dimensions"), view.axis(0)
    if axis is not None:
        out = kept[axis]
        return along(view, (label,), sharded(out), shape=local_sizes(view, shape, out))
    has_batch = any(view.mesh.has_letter(size) for size in view.shapes[0])
    new = None if has_batch else view.mesh.batch_axis(shape, among=broadcast_axes(view))
    if new is not None:
        sizes = local_sizes(view, shape, new)
        return along(view, (completed(label),), sharded(new), shape=sizes)
    return whole(view) if view.completes else _kept(view)


def broadcast_axes(view: OperatorView) -> list[int]:
    """Returns the axes of a broadcast's result along which all elements are equal."""
    kept = dict(zip(view.ints("broadcast_dimensions"), view.shapes[0], strict=True))
    return [axis for axis, size in enumerate(view.out_shapes[0]) if kept.get(axis) != size]


def iota(view: OperatorView) -> OperatorSharding:
    """Counts this device's rows if the counted axis is the cut one."""
    shape = view.out_shapes[0]
    axis = view.mesh.batch_axis(shape)
    if axis is None:
        return whole(view)
    return sharded_iota(view, axis)


def sharded_iota(view: OperatorView, axis: int) -> OperatorSharding:
    """Counts a device's part of an axis."""
    sizes = local_sizes(view, view.out_shapes[0], axis)
    placing = along(view, (), sharded(axis), shape=sizes)
    if view.number("dimension") != axis:
        return placing
    return OperatorSharding(placing.inputs, placing.outputs, placing.attrs, op_type="c_iota")


def reshape(view: OperatorView) -> OperatorSharding:
    """Follows the cut axis if it stays the slowest of the axes it is merged with."""
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


def transpose(view: OperatorView) -> OperatorSharding:
    """Follows the cut axis through the permutation."""
    return _moved(view, lambda axis: view.ints("permutation").index(axis))


def squeeze(view: OperatorView) -> OperatorSharding:
    """Follows the cut axis past the removed ones."""
    gone = view.ints("dimensions")
    if view.axis(0) in gone:  # a single row, on a single device
        return whole(view)
    return _moved(view, lambda axis: axis - sum(place < axis for place in gone))


def concatenate(view: OperatorView) -> OperatorSharding:
    """Joins along an axis that is not cut, or on every device whole."""
    cut = next((label.axis for label in view.labels if label.is_sharded), None)
    if cut is None:
        return _all_sums(view)
    if cut == view.number("dimension"):
        return gathered(view, "rows are joined along the batch axis")
    return along(view, (sharded(cut),) * len(view.labels), sharded(cut))


def stack(view: OperatorView) -> OperatorSharding:
    """Stacks along a new axis."""
    cut = next((label.axis for label in view.labels if label.is_sharded), None)
    if cut is None:
        return _all_sums(view)
    out = cut + (view.number("axis") <= cut)
    return along(view, (sharded(cut),) * len(view.labels), sharded(out))


def unstack(view: OperatorView) -> OperatorSharding:
    """Unstacks an axis that is not cut, or on every device whole."""
    place, count, axis = view.number("axis"), len(view.out_shapes), view.axis(0)
    if axis is None:
        return along(view, (SUM,), *[SUM] * count) if view.labels[0].is_sum else whole(view)
    if axis == place:
        return gathered(view, "the rows of the batch are taken apart")
    return along(view, view.labels, *[sharded(axis - (place < axis))] * count)


def _all_sums(view: OperatorView) -> OperatorSharding:
    parts = [label.is_sum or place in view.zeros for place, label in enumerate(view.labels)]
    if SUM in view.labels and all(parts):
        return along(view, (SUM,) * len(parts), SUM)
    return whole(view)


def _moved(view: OperatorView, follow: Callable[[int], int]) -> OperatorSharding:
    axis = view.axis(0)
    if axis is None:
        return _kept(view)
    return along(view, view.labels, sharded(follow(axis)))


def _kept(view: OperatorView) -> OperatorSharding:
    """Keeps a summand a summand; completes anything else."""
    return along(view, view.labels, view.labels[0]) if view.labels[0].is_sum else whole(view)


def _same_rows(
    view: OperatorView, shape: Sequence[Size], axis: int, out: Sequence[Size]
) -> int | None:
    """Returns the axis of `out` that cuts the same elements as `axis` cuts of `shape`."""
    before = prod(shape[:axis], start=1)
    for place in range(len(out)):
        if prod(out[:place], start=1) != before:
            continue
        if view.mesh.part(out[place]) is not None and out[place] != 1:
            return place
    return None


LINEAR_MIXING = frozenset({"jax.rev", "jax.cumsum", "jax.split"})
MIXING = frozenset(
    f"jax.{name}"
    for name in (
        *("cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "top_k", "approx_top_k"),
        *("fft", "reduce_window", "reduce_window_sum", "reduce_window_max"),
        *("reduce_window_min", "select_and_scatter_add", "select_and_gather_add"),
        *("select_and_scatter", "cholesky", "triangular_solve", "eigh", "svd", "qr", "lu"),
    )
)


def unmixed_rows(view: OperatorView) -> OperatorSharding:
    """Keeps rows if the mixed axes are not cut."""
    axes = {label.axis for label in view.labels if label.is_sharded}
    if not axes:
        return whole(view)
    axis = axes.pop()
    if axes or axis in mixed_axes(view):
        return gathered(view, f"{view.op.type} works along the batch axis")
    rank = len(view.shapes[0])
    inputs = [
        sharded(axis) if len(shape) == rank else completed(label)
        for shape, label in zip(view.shapes, view.labels, strict=True)
    ]
    return along(view, inputs, *[sharded(axis)] * len(view.out_shapes))


def unmixed_rows_linear(view: OperatorView) -> OperatorSharding:
    """As `unmixed_rows`, and keeps summands: `rev`, `cumsum`, `split`."""
    if view.labels[0].is_sum:
        return along(view, view.labels, *view.labels * len(view.out_shapes))
    return unmixed_rows(view)


def pad(view: OperatorView) -> OperatorSharding:
    """As `unmixed_rows`, and keeps a summand that is padded with a summand or zero."""
    parts = [label.is_sum or place in view.zeros for place, label in enumerate(view.labels)]
    if SUM in view.labels and all(parts):
        return along(view, (SUM, SUM), SUM)
    return unmixed_rows(view)


def mixed_axes(view: OperatorView) -> set[int]:
    """Returns the axes along which an operator mixes elements."""
    rank = len(view.shapes[0])
    match view.op.type.removeprefix("jax."):
        case "rev":
            return set(view.ints("dimensions"))
        case "sort":
            return {view.number("dimension")}
        case "top_k":
            return {view.number("axis") % rank if "axis" in view.op.attrs else rank - 1}
        case "approx_top_k":
            return {view.number("reduction_dimension") % rank}
        case "pad":
            return _padded(view)
        case "fft":
            return set(range(rank - len(as_sizes(view.op.attrs["fft_lengths"])), rank))
        case "split" | "cumsum" | "cumprod" | "cummax" | "cummin" | "cumlogsumexp":
            return {view.number("axis")}
        case name if name.startswith(("reduce_window", "select_and_")):
            return _windowed(view)
    return {rank - 1, rank - 2}  # linear algebra: the last two axes are a matrix


def _padded(view: OperatorView) -> set[int]:
    config = view.op.attrs["padding_config"]
    assert isinstance(config, tuple)
    return {axis for axis, edges in enumerate(config) if edges != (0, 0, 0)}


def _windowed(view: OperatorView) -> set[int]:
    """Returns the axes along which a window is wider than one element, moves or pads."""
    attrs, count = view.op.attrs, len(view.shapes[0])
    ones, none = (1,) * count, ((0, 0),) * count
    touched: set[int] = set()
    for name, still in (
        ("window_dimensions", ones),
        ("window_strides", ones),
        ("padding", none),
        ("base_dilation", ones),
        ("window_dilation", ones),
    ):
        found = attrs.get(name, still)
        assert isinstance(found, tuple)
        touched |= {axis for axis in range(count) if found[axis] != still[axis]}
    return touched


THREEFRY = "key<fry>"
OWN_ROWS = {"jax.random_bits": "c_random_bits", "jax.random_split": "c_random_split"}


def draw(view: OperatorView) -> OperatorSharding:
    """Draws this device's rows, or makes its keys, if the shape grows with the batch.

    Each of several keys that are rows draws for itself.
    """
    label, shape = view.labels[0], view.out_shapes[0]
    if label.is_sharded:
        return along(view, (label,), label)
    lead = len(view.shapes[0])
    axis = view.mesh.batch_axis(shape, among=range(lead, len(shape)))
    if axis is None and lead == 0 and view.mesh.rows is not None:
        # The batch is a number: a leading axis of that length is most likely the batch. If it is
        # not, the rows are gathered, and are equal nevertheless.
        axis = 0 if shape[:1] == (view.mesh.rows,) else None
    return whole(view) if axis is None else sharded_draw(view, axis)


def sharded_draw(view: OperatorView, axis: int) -> OperatorSharding:
    """Draws a device's part of an axis of the result from a replicated key."""
    lead = len(view.shapes[0])
    sizes = local_sizes(view, view.out_shapes[0], axis)
    attrs = view.mesh.full_attrs(view.op.attrs).updated(
        shape=sizes[lead:], rows_axis=axis - lead, devices=view.mesh.devices
    )
    note = "" if view.dtypes[0] == THREEFRY else f"{view.dtypes[0]} draws from a key per device"
    return OperatorSharding(
        (completed(view.labels[0]),), (sharded(axis),), attrs, OWN_ROWS[view.op.type], note
    )


REMATERIALIZABLE = frozenset({"jax.broadcast_in_dim", "jax.iota", *OWN_ROWS})


def rematerialized(view: OperatorView, wanted: Sharding) -> OperatorSharding | None:
    """Returns how an operator makes its result in the wanted layout, or None.

    The operator is one of `REMATERIALIZABLE`, its labels those that it ran with; `wanted` is
    replicated or cut.
    """
    if not all(label in {REPLICATED, VARYING} for label in view.labels):
        return None
    if wanted.is_sharded and not _can_be_cut(view, wanted.axis):
        return None
    match view.op.type:
        case "jax.broadcast_in_dim" if wanted.is_sharded:
            sizes = local_sizes(view, view.out_shapes[0], wanted.axis)
            return along(view, view.labels, sharded(wanted.axis), shape=sizes)
        case "jax.iota" if wanted.is_sharded:
            return sharded_iota(view, wanted.axis)
        case "jax.broadcast_in_dim" | "jax.iota" if wanted == REPLICATED:
            return whole(view)
        case op_type if op_type in OWN_ROWS and wanted.is_sharded:
            return sharded_draw(view, wanted.axis)
    return None


def _can_be_cut(view: OperatorView, axis: int) -> bool:
    """Whether each device can make its part of an axis, equal to one device's result."""
    if view.op.type == "jax.broadcast_in_dim":
        return axis in broadcast_axes(view)
    if view.op.type == "jax.iota":
        return True
    return view.dtypes[0] == THREEFRY and axis >= len(view.shapes[0])

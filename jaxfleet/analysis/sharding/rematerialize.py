"""Regeneration of values under another sharding: broadcasts, counts and random numbers.

With jax's counter-based generator (threefry, partitionable) the bits of a row depend only on the
key and the row's number, so each device draws its own rows of one device's draw. Any other
generator gets a key for each device, and the numbers differ from those of one device.
"""

from jaxfleet.analysis.sharding.rule_api import (
    OperatorSharding,
    OperatorView,
    along,
    local_sizes,
    whole,
)
from jaxfleet.analysis.sharding.shape import broadcast_axes, sharded_iota
from jaxfleet.analysis.sharding.spec import REPLICATED, VARYING, Sharding, completed, sharded

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

"""Rules for random numbers: a device draws its own rows of what one device would draw.

With jax's counter-based generator (threefry, partitionable) the bits of a row depend on the key
and the row's number alone, so each device can make its own. Any other generator gets a key for
each device, and the numbers differ from those of one device.
"""

from jaxfleet.analysis.labels.label import (
    Placing,
    View,
    along,
    local_sizes,
    settle,
    sharded,
)
from jaxfleet.ir import Attr

THREEFRY = "key<fry>"


def random_bits(view: View) -> Placing:
    """Draws this device's rows where the shape grows with the batch."""
    return _rows(view, "c_random_bits", view.op.attrs["shape"])


def random_split(view: View) -> Placing:
    """Makes this device's keys where their number grows with the batch."""
    return _rows(view, "c_random_split", view.op.attrs["shape"])


def _rows(view: View, op_type: str, shape: Attr) -> Placing:
    label = view.labels[0]
    assert isinstance(shape, tuple)
    if label.is_sharded:
        return along(view, (label,), sharded(label.axis))
    out = view.out_shapes[0]
    axis = view.mesh.batch_axis(out)
    if axis is None:
        return along(view, (settle(label),), view.settled)
    lead = len(view.shapes[0])
    sizes = local_sizes(view, out, axis)
    assert isinstance(sizes, tuple)
    placing = along(view, (settle(label),), sharded(axis), shape=sizes[lead:])
    note = "" if view.dtypes[0] == THREEFRY else f"{view.dtypes[0]} draws from a key per device"
    rows = placing.attrs.updated(rows_axis=axis - lead, devices=view.mesh.devices)
    return Placing(placing.inputs, placing.outputs, rows, op_type=op_type, note=note)

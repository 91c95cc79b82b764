"""Rules for random numbers: a device draws its own rows of what one device would draw.

With jax's counter-based generator (threefry, partitionable) the bits of a row depend on the key
and the row's number alone, so each device can make its own. Any other generator gets a key for
each device, and the numbers differ from those of one device.
"""

from jaxfleet.analysis.labels.label import settle, sharded
from jaxfleet.analysis.labels.placing import Placing, View, along, local_sizes, whole

THREEFRY = "key<fry>"
OWN_ROWS = {"jax.random_bits": "c_random_bits", "jax.random_split": "c_random_split"}


def draw(view: View) -> Placing:
    """Draws this device's rows, or makes its keys, where the shape grows with the batch.

    Keys that are rows each draw for themselves.
    """
    label, shape = view.labels[0], view.out_shapes[0]
    if label.is_sharded:
        return along(view, (label,), label)
    lead = len(view.shapes[0])
    axis = view.mesh.batch_axis(shape, among=range(lead, len(shape)))
    if axis is None and lead == 0 and view.mesh.rows is not None:
        # The batch is a number: a leading axis as long as it is most likely the batch. Where it
        # is not, the rows are gathered, and are the same all the same.
        axis = 0 if shape[:1] == (view.mesh.rows,) else None
    return whole(view) if axis is None else drawn(view, axis)


def drawn(view: View, axis: int) -> Placing:
    """Draws a device's part of an axis of the result, each device with what all agree on."""
    lead = len(view.shapes[0])
    sizes = local_sizes(view, view.out_shapes[0], axis)
    attrs = view.mesh.full_attrs(view.op.attrs).updated(
        shape=sizes[lead:], rows_axis=axis - lead, devices=view.mesh.devices
    )
    note = "" if view.dtypes[0] == THREEFRY else f"{view.dtypes[0]} draws from a key per device"
    return Placing((settle(view.labels[0]),), (sharded(axis),), attrs, OWN_ROWS[view.op.type], note)

"""Makes a value anew where it is needed, rather than move it between devices."""

from jaxfleet.analysis.labels.label import REPLICATED, VARYING, Label, sharded
from jaxfleet.analysis.labels.placing import Placing, View, along, local_sizes, whole
from jaxfleet.analysis.labels.random import OWN_ROWS, THREEFRY, drawn
from jaxfleet.analysis.labels.shape import counted, grown_axes

REMADE = frozenset({"jax.broadcast_in_dim", "jax.iota", *OWN_ROWS})


def remade(view: View, wanted: Label) -> Placing | None:
    """Returns how an operator makes its result lie as is wanted, or None.

    Args:
        view: an operator among `REMADE`, its labels those that it ran with.
        wanted: replicated, or cut.
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
            return counted(view, wanted.axis)
        case "jax.broadcast_in_dim" | "jax.iota" if wanted == REPLICATED:
            return whole(view)
        case op_type if op_type in OWN_ROWS and wanted.is_sharded:
            return drawn(view, wanted.axis)
    return None


def _can_be_cut(view: View, axis: int) -> bool:
    """Tells whether each device can make a part of an axis, and get what one device would."""
    if view.op.type == "jax.broadcast_in_dim":
        return axis in grown_axes(view)
    if view.op.type == "jax.iota":
        return True
    return view.dtypes[0] == THREEFRY and axis >= len(view.shapes[0])

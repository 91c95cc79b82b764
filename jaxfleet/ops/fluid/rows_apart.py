"""Operators of `IfElse`, which computes some rows of a batch in one way and the others in another.

An array keeps its size on a device. So both ways get all rows: in the places of those that are not
theirs stand copies of one that is, which computes nothing that they would not, and is not used.
"""

import jax.numpy as jnp

from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.schema import Attributes, Gradient, Value, fluid_op
from jaxfleet.ops.registry import Array


def _only(x: Array, flags: Array) -> Array:
    """Returns rows where those that are not flagged are copies of the first that is."""
    return x[jnp.where(flags, jnp.arange(x.shape[0]), jnp.argmax(flags))]


@fluid_op("split_lod_tensor", inputs="X Mask", outputs="OutTrue OutFalse",
          gradient=Gradient("split_lod_tensor_grad", ("X", "Mask"), ("X",)))  # fmt: skip
def split_lod_tensor(_: Attributes, x: Array, mask: Array) -> Value:
    """Takes the rows for which a mask holds, and the others."""
    flags = mask.reshape(-1).astype(bool)
    return _only(x, flags), _only(x, ~flags)


@fluid_op("merge_lod_tensor", inputs="Mask InTrue InFalse",
          gradient=Gradient("merge_lod_tensor_grad", ("Mask", "InTrue", "InFalse"),
                            ("InTrue", "InFalse")))  # fmt: skip
def merge_lod_tensor(_: Attributes, mask: Array, if_true: Array, if_false: Array) -> Array:
    """Takes each row from the side that its mask says."""
    flags = mask.reshape(-1, *[1] * (if_true.ndim - 1)).astype(bool)
    return jnp.where(flags, if_true, if_false)


define_gradient("split_lod_tensor")
define_gradient("merge_lod_tensor")

"""Arrays of tensors (`array_write`, ...): as many rows as they can have, and how many were written.

A device's arrays have one size while they live. So an array is `[capacity, ...]` from the start,
zero where nothing was written, and its length is a variable beside it.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxfleet.ops.fluid.arrays import device_dtype
from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.schema import Attributes, Gradient, Value, fluid_op
from jaxfleet.ops.registry import Array


@fluid_op("new_array", outputs="Out Length",
          attrs={"capacity": 0, "shape": [], "dtype": "float32"})  # fmt: skip
def new_array(attrs: Attributes) -> Value:
    """Makes an array with room for `capacity` tensors of a shape, and none in it."""
    shape = (attrs["capacity"], *attrs["shape"])
    return jnp.zeros(shape, device_dtype(attrs["dtype"])), jnp.zeros(1, jnp.int32)


def _index(i: Array) -> Array:
    return i.reshape(()).astype(jnp.int32)


def _write_back(
    _: Attributes, reads: Mapping[str, Value], grads: Mapping[str, Value]
) -> Mapping[str, Value]:
    at, grad = _index(reads["I"]), grads["Out"]
    return {"X": grad[at], "Array": grad.at[at].set(0, mode="drop")}


@fluid_op("write_to_array", inputs="X I Array Length", outputs="Out LengthOut",
          gradient=Gradient("write_to_array_grad", ("I",), ("X", "Array"),
                            _write_back))  # fmt: skip
def write_to_array(_: Attributes, x: Array, i: Array, array: Array, length: Array) -> Value:
    """Puts a tensor into an array; beyond its capacity nothing is put."""
    at = _index(i)
    made = array.at[at].set(x.astype(array.dtype), mode="drop")
    return made, jnp.maximum(length, jnp.minimum(at + 1, array.shape[0]))


@fluid_op("read_from_array", inputs="X I",
          gradient=Gradient("read_from_array_grad", ("X", "I"), ("X",)))  # fmt: skip
def read_from_array(_: Attributes, array: Array, i: Array) -> Array:
    """Takes a tensor out of an array; NaN beyond its end, where fluid ends the program."""
    return array.at[_index(i)].get(mode="fill")


@fluid_op("lod_array_length", inputs="X Length")
def lod_array_length(_: Attributes, __: Array, length: Array) -> Array:
    """Returns how many tensors were written: `[1]`."""
    return length


@fluid_op("select_input", inputs="X* Mask",
          gradient=Gradient("select_input_grad", ("X", "Mask"), ("X",)))  # fmt: skip
def select_input(_: Attributes, xs: list[Array], mask: Array) -> Array:
    """Takes the tensor of a number."""
    return jax.lax.select_n(mask.reshape(()).astype(jnp.int32), *xs)


@fluid_op("stop_gradient", inputs="X")
def stop_gradient(_: Attributes, x: Array) -> Array:
    """Returns what it takes, and ends gradients within a block that is differentiated whole."""
    return jax.lax.stop_gradient(x)


for _type in ("write_to_array", "read_from_array", "select_input"):
    define_gradient(_type)

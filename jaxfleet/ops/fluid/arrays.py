"""Operators that create, cast and fill arrays, and tensor arrays of bounded length.

Arrays on a device have a fixed size, so a tensor array is allocated as `[capacity, ...]`, zero in
elements that were not written, with its length in a separate variable.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.schema import Attributes, Gradient, Schema, Value, describe, fluid_op, slots
from jaxfleet.ops.jax_adapter import numpy_dtype
from jaxfleet.ops.registry import Array

# Device dtypes while JAX's 64-bit types are off.
ON_DEVICE: Mapping[str, str] = {"int64": "int32", "float64": "float32"}


def device_dtype(name: str) -> np.dtype[Any]:
    """The device dtype for one of fluid's dtypes."""
    return numpy_dtype(ON_DEVICE.get(name, name))


def _described(op_type: str, inputs: str, attrs: Mapping[str, Any], gradient: Gradient) -> None:
    """Declares the schema of an operator of `jaxfleet.ops.pserver_ops` or `basic`."""
    describe(Schema(op_type, slots(inputs), slots("Out"), attrs, gradient))


_SCALE = {"scale": 1.0, "bias": 0.0, "bias_after_scale": True}
_described("assign", "X", {}, Gradient("assign", (), ("X",), by=lambda _: {}))
_described("scale", "X", _SCALE,
           Gradient("scale", (), ("X",), by=lambda attrs: {"scale": attrs["scale"]}))  # fmt: skip
_described("sum", "X*", {"use_mkldnn": False},
           Gradient("scale", (), ("X",), by=lambda _: {"scale": 1.0}))  # fmt: skip
_described("concat", "X*", {"axis": 0}, Gradient("concat_grad", ("X",), ("X",)))
define_gradient("concat")


def _cast_back(attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"in_dtype": attrs["out_dtype"], "out_dtype": attrs["in_dtype"]}


@fluid_op("cast", inputs="X", attrs={"in_dtype": "float32", "out_dtype": "float32"},
          gradient=Gradient("cast", (), ("X",), by=_cast_back))  # fmt: skip
def cast(attrs: Mapping[str, Any], x: Array) -> Array:
    """Converts to `out_dtype`."""
    return x.astype(device_dtype(attrs["out_dtype"]))


@fluid_op("fill_constant", attrs={"shape": [1], "value": 0.0, "dtype": "float32",
                                  "force_cpu": False})  # fmt: skip
def fill_constant(attrs: Mapping[str, Any]) -> Array:
    """Array filled with one value."""
    return jnp.full(attrs["shape"], attrs["value"], device_dtype(attrs["dtype"]))


@fluid_op("fill_zeros_like", inputs="X")
def fill_zeros_like(_: Mapping[str, Any], x: Array) -> Array:
    """Zeros of the same shape."""
    return jnp.zeros_like(x)


@fluid_op("fill_any_like", inputs="X", attrs={"value": 0.0, "dtype": None})
def fill_any_like(attrs: Mapping[str, Any], x: Array) -> Array:
    """Array of the same shape, filled with one value."""
    dtype = x.dtype if attrs["dtype"] is None else device_dtype(attrs["dtype"])
    return jnp.full_like(x, attrs["value"], dtype=dtype)


@fluid_op("assign_value", attrs={"shape": [1], "values": [0.0], "dtype": "float32"})
def assign_value(attrs: Mapping[str, Any]) -> Array:
    """Array of given values."""
    values = np.asarray(attrs["values"], device_dtype(attrs["dtype"]))
    return jnp.asarray(values.reshape(attrs["shape"]))


@fluid_op("fill_constant_batch_size_like", inputs="Input",
          attrs={"shape": [1], "value": 0.0, "dtype": "float32", "input_dim_idx": 0,
                 "output_dim_idx": 0, "force_cpu": False})  # fmt: skip
def fill_constant_batch_size_like(attrs: Mapping[str, Any], like: Array) -> Array:
    """Array filled with one value, one of whose sizes is another array's."""
    shape = list(attrs["shape"])
    shape[attrs["output_dim_idx"]] = like.shape[attrs["input_dim_idx"]]
    return jnp.full(shape, attrs["value"], device_dtype(attrs["dtype"]))


@fluid_op("shape", inputs="Input")
def shape(_: Mapping[str, Any], x: Array) -> Array:
    """The shape of an array."""
    return jnp.asarray(x.shape, jnp.int32)


@fluid_op("is_empty", inputs="X XLevels?")
def is_empty(_: Mapping[str, Any], x: Array, levels: Array | None) -> Array:
    """Whether an array has no elements, or sequences have no rows: `[1]`."""
    if levels is None:
        return jnp.full(1, x.size == 0)
    return levels[levels.shape[0] - x.shape[0] :].sum(keepdims=True) == 0


@fluid_op("new_array", outputs="Out Length OutLevels?",
          attrs={"capacity": 0, "shape": [], "dtype": "float32", "levels": 0})  # fmt: skip
def new_array(attrs: Attributes) -> Value:
    """Allocates an empty array with a capacity of tensors of one shape.

    `OutLevels` has space for their levels, in case the tensors are sequences of two levels.
    """
    shape = (attrs["capacity"], *attrs["shape"])
    levels = jnp.zeros((attrs["capacity"], attrs["levels"]), jnp.int32)
    return jnp.zeros(shape, device_dtype(attrs["dtype"])), jnp.zeros(1, jnp.int32), levels


def _index(i: Array) -> Array:
    return i.reshape(()).astype(jnp.int32)


def _write_back(
    attrs: Attributes, reads: Mapping[str, Value], grads: Mapping[str, Value]
) -> Mapping[str, Value]:
    at, grad, rows = _index(reads["I"]), grads["Out"], attrs["rows"]
    own = grad[at] if rows < 0 else grad[at][:rows]
    return {"X": own, "Array": grad.at[at].set(0, mode="drop")}


@fluid_op("write_to_array", inputs="X I Array Length XLevels? ArrayLevels?",
          outputs="Out LengthOut OutLevels?", attrs={"rows": -1},
          gradient=Gradient("write_to_array_grad", ("I",), ("X", "Array"),
                            _write_back))  # fmt: skip
def write_to_array(
    attrs: Attributes,
    x: Array,
    i: Array,
    array: Array,
    length: Array,
    own: Array | None,
    levels: Array | None,
) -> Value:
    """Writes a tensor into an array; beyond its capacity nothing is written.

    `rows` is the tensor's number of rows if the array's tensors have more; it is zero-padded.
    """
    at = _index(i)
    if attrs["rows"] >= 0:
        more = array.shape[1] - len(x)
        x = jnp.concatenate([x, jnp.zeros((more, *x.shape[1:]), x.dtype)])
    made = array.at[at].set(x.astype(array.dtype), mode="drop")
    if own is not None and levels is not None:
        levels = levels.at[at].set(own, mode="drop")
    return made, jnp.maximum(length, jnp.minimum(at + 1, array.shape[0])), levels


@fluid_op("read_from_array", inputs="X I XLevels?", outputs="Out OutLevels?",
          gradient=Gradient("read_from_array_grad", ("X", "I", "XLevels"), ("X",)))  # fmt: skip
def read_from_array(_: Attributes, array: Array, i: Array, levels: Array | None) -> Value:
    """Reads a tensor of an array; NaN beyond its end, where fluid raises."""
    at = _index(i)
    levels = jnp.zeros((1, 0), jnp.int32) if levels is None else levels
    own = levels.at[at].get(mode="fill", fill_value=0)
    return array.at[at].get(mode="fill"), own


@fluid_op("lod_array_length", inputs="X Length")
def lod_array_length(_: Attributes, __: Array, length: Array) -> Array:
    """Number of written tensors: `[1]`."""
    return length


@fluid_op("select_input", inputs="X* Mask",
          gradient=Gradient("select_input_grad", ("X", "Mask"), ("X",)))  # fmt: skip
def select_input(_: Attributes, xs: list[Array], mask: Array) -> Array:
    """Selects a tensor by number."""
    return jax.lax.select_n(mask.reshape(()).astype(jnp.int32), *xs)


@fluid_op("stop_gradient", inputs="X")
def stop_gradient(_: Attributes, x: Array) -> Array:
    """Identity that stops gradients in a block that is differentiated as a whole."""
    return jax.lax.stop_gradient(x)


for _type in ("write_to_array", "read_from_array", "select_input"):
    define_gradient(_type)

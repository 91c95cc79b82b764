"""Operators that make arrays, or copy them as they are."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfleet.ops.fluid.gradients import define_gradient, differentiable
from jaxfleet.ops.fluid.schema import Gradient, Schema, describe, fluid_op, slots
from jaxfleet.ops.jax_adapter import numpy_dtype
from jaxfleet.ops.registry import Array

# What a device computes with, where JAX's 64-bit types are off.
ON_DEVICE: Mapping[str, str] = {"int64": "int32", "float64": "float32"}


def device_dtype(name: str) -> np.dtype[Any]:
    """Returns what a device computes with for one of fluid's dtypes."""
    return numpy_dtype(ON_DEVICE.get(name, name))


def _described(op_type: str, inputs: str, attrs: Mapping[str, Any], *, differs: bool) -> None:
    """Says what an operator of `jaxfleet.ops.rewriting` or `basic` looks like."""
    schema = Schema(op_type, slots(inputs), slots("Out"), attrs)
    if not differs:
        describe(schema)
        return
    describe(Schema(op_type, schema.inputs, schema.outputs, attrs, differentiable(schema)))
    define_gradient(op_type)


_described("assign", "X", {}, differs=True)
_described("sum", "X*", {"use_mkldnn": False}, differs=True)
_described("concat", "X*", {"axis": 0}, differs=True)
_described("scale", "X", {"scale": 1.0, "bias": 0.0, "bias_after_scale": True}, differs=True)


@fluid_op("cast", inputs="X", attrs={"in_dtype": "float32", "out_dtype": "float32"},
          gradient=Gradient("cast_grad", ("X",), ("X",)))  # fmt: skip
def cast(attrs: Mapping[str, Any], x: Array) -> Array:
    """Converts to `out_dtype`."""
    return x.astype(device_dtype(attrs["out_dtype"]))


define_gradient("cast")


@fluid_op("fill_constant", attrs={"shape": [1], "value": 0.0, "dtype": "float32",
                                  "force_cpu": False})  # fmt: skip
def fill_constant(attrs: Mapping[str, Any]) -> Array:
    """Makes an array of one value."""
    return jnp.full(attrs["shape"], attrs["value"], device_dtype(attrs["dtype"]))


@fluid_op("fill_zeros_like", inputs="X")
def fill_zeros_like(_: Mapping[str, Any], x: Array) -> Array:
    """Makes zeros of the same shape."""
    return jnp.zeros_like(x)


@fluid_op("fill_any_like", inputs="X", attrs={"value": 0.0, "dtype": None})
def fill_any_like(attrs: Mapping[str, Any], x: Array) -> Array:
    """Makes an array of the same shape, of one value."""
    dtype = x.dtype if attrs["dtype"] is None else device_dtype(attrs["dtype"])
    return jnp.full_like(x, attrs["value"], dtype=dtype)


@fluid_op("assign_value", attrs={"shape": [1], "values": [0.0], "dtype": "float32"})
def assign_value(attrs: Mapping[str, Any]) -> Array:
    """Makes an array of given values."""
    values = np.asarray(attrs["values"], device_dtype(attrs["dtype"]))
    return jnp.asarray(values.reshape(attrs["shape"]))


@fluid_op("fill_constant_batch_size_like", inputs="Input",
          attrs={"shape": [1], "value": 0.0, "dtype": "float32", "input_dim_idx": 0,
                 "output_dim_idx": 0, "force_cpu": False})  # fmt: skip
def fill_constant_batch_size_like(attrs: Mapping[str, Any], like: Array) -> Array:
    """Makes an array of one value, one of whose sizes is another array's."""
    shape = list(attrs["shape"])
    shape[attrs["output_dim_idx"]] = like.shape[attrs["input_dim_idx"]]
    return jnp.full(shape, attrs["value"], device_dtype(attrs["dtype"]))


@fluid_op("shape", inputs="Input")
def shape(_: Mapping[str, Any], x: Array) -> Array:
    """Tells the sizes of an array."""
    return jnp.asarray(x.shape, jnp.int32)


@fluid_op("is_empty", inputs="X")
def is_empty(_: Mapping[str, Any], x: Array) -> Array:
    """Tells whether an array has no elements: `[1]`."""
    return jnp.full(1, x.size == 0)

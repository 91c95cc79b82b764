"""Operators that make arrays, or copy them as they are."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.schema import Gradient, Schema, describe, fluid_op, slots
from jaxfleet.ops.jax_adapter import numpy_dtype
from jaxfleet.ops.registry import Array

# What a device computes with, where JAX's 64-bit types are off.
ON_DEVICE: Mapping[str, str] = {"int64": "int32", "float64": "float32"}


def device_dtype(name: str) -> np.dtype[Any]:
    """Returns what a device computes with for one of fluid's dtypes."""
    return numpy_dtype(ON_DEVICE.get(name, name))


def _described(op_type: str, inputs: str, attrs: Mapping[str, Any], gradient: Gradient) -> None:
    """Says what an operator of `jaxfleet.ops.rewriting` or `basic` looks like."""
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

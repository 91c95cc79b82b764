"""Operators that make arrays, and move what is in them."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfleet.ops.fluid.gradients import define_gradient, differentiable
from jaxfleet.ops.fluid.schema import Gradient, Schema, Value, describe, fluid_op, slots
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


def _shape_back(
    _: Mapping[str, Any], reads: Mapping[str, Value], grads: Mapping[str, Value]
) -> Mapping[str, Value]:
    return {"X": grads["Out"].reshape(reads["XShape"].shape[1:])}


_SHAPED = ("XShape",)


def shape_record(x: Array) -> Array:
    """Returns an array of no elements that knows a shape, for the gradient operator."""
    return jnp.zeros((0, *x.shape), x.dtype)


@fluid_op("reshape2", inputs="X", outputs="Out XShape", attrs={"shape": []},
          gradient=Gradient("reshape2_grad", _SHAPED, ("X",), _shape_back))  # fmt: skip
def reshape2(attrs: Mapping[str, Any], x: Array) -> Value:
    """Gives another shape; 0 keeps an axis as it is, -1 is what is left."""
    shape = [x.shape[at] if size == 0 else size for at, size in enumerate(attrs["shape"])]
    return jnp.reshape(x, shape), shape_record(x)


define_gradient("reshape2")


@fluid_op("unsqueeze2", inputs="X", outputs="Out XShape", attrs={"axes": []},
          gradient=Gradient("unsqueeze2_grad", _SHAPED, ("X",), _shape_back))  # fmt: skip
def unsqueeze2(attrs: Mapping[str, Any], x: Array) -> Value:
    """Adds axes of size 1."""
    return jnp.expand_dims(x, tuple(attrs["axes"])), shape_record(x)


define_gradient("unsqueeze2")


@fluid_op("squeeze2", inputs="X", outputs="Out XShape", attrs={"axes": []},
          gradient=Gradient("squeeze2_grad", _SHAPED, ("X",), _shape_back))  # fmt: skip
def squeeze2(attrs: Mapping[str, Any], x: Array) -> Value:
    """Drops axes of size 1."""
    return jnp.squeeze(x, tuple(attrs["axes"]) or None), shape_record(x)


define_gradient("squeeze2")


def _transpose_back(
    attrs: Mapping[str, Any], _: Mapping[str, Value], grads: Mapping[str, Value]
) -> Mapping[str, Value]:
    return {"X": jnp.transpose(grads["Out"], np.argsort(attrs["axis"]).tolist())}


@fluid_op("transpose2", inputs="X", outputs="Out XShape", attrs={"axis": []},
          gradient=Gradient("transpose2_grad", _SHAPED, ("X",), _transpose_back))  # fmt: skip
def transpose2(attrs: Mapping[str, Any], x: Array) -> Value:
    """Puts axes in another order."""
    return jnp.transpose(x, attrs["axis"]), shape_record(x)


define_gradient("transpose2")


def _split_back(
    attrs: Mapping[str, Any], _: Mapping[str, Value], grads: Mapping[str, Value]
) -> Mapping[str, Value]:
    return {"X": jnp.concatenate(grads["Out"], axis=attrs["axis"])}


@fluid_op("split", inputs="X", outputs="Out*", attrs={"num": 0, "sections": [], "axis": 0},
          gradient=Gradient("split_grad", (), ("X",), _split_back))  # fmt: skip
def split(attrs: Mapping[str, Any], x: Array) -> Value:
    """Cuts along an axis, into `num` parts or `sections` rows each."""
    if attrs["num"]:
        return jnp.split(x, attrs["num"], axis=attrs["axis"])
    return jnp.split(x, np.cumsum(attrs["sections"])[:-1], axis=attrs["axis"])


define_gradient("split")


@fluid_op("lookup_table_v2", inputs="W Ids",
          attrs={"is_sparse": False, "is_distributed": False, "padding_idx": -1,
                 "remote_prefetch": False, "trainer_id": 0, "slot": 0, "height_sections": [],
                 "epmap": [], "table_names": []},
          gradient=Gradient("lookup_table_v2_grad", ("W", "Ids"), ("W",)))  # fmt: skip
def lookup_table_v2(attrs: Mapping[str, Any], table: Array, ids: Array) -> Array:
    """Takes rows of a table; those of `padding_idx` are zero."""
    rows = jnp.take(table, ids, axis=0, mode="clip")
    if attrs["padding_idx"] < 0:
        return rows
    return jnp.where((ids == attrs["padding_idx"])[..., None], 0, rows)


define_gradient("lookup_table_v2")


@fluid_op("one_hot_v2", inputs="X", attrs={"depth": 1})
def one_hot_v2(attrs: Mapping[str, Any], x: Array) -> Array:
    """Makes rows that are 1 where they are named, and else 0."""
    return (x[..., None] == jnp.arange(attrs["depth"])).astype(jnp.float32)


@fluid_op("top_k", inputs="X", outputs="Out Indices", attrs={"k": 1})
def top_k(attrs: Mapping[str, Any], x: Array) -> Value:
    """Finds the `k` largest along the last axis, and where they are."""
    order = jnp.argsort(-x, axis=-1)[..., : attrs["k"]]
    return jnp.take_along_axis(x, order, axis=-1), order.astype(jnp.int32)


@fluid_op("accuracy", inputs="Out Indices Label", outputs="Accuracy Correct Total")
def accuracy(_: Mapping[str, Any], __: Array, indices: Array, label: Array) -> Value:
    """Tells which share of rows has its label among the indices."""
    hits = jnp.sum(jnp.any(indices == label.reshape(-1, 1), axis=1))
    total = indices.shape[0]
    share = hits.astype(jnp.float32) / total
    return share.reshape(1), hits.astype(jnp.int32).reshape(1), jnp.full(1, total, jnp.int32)

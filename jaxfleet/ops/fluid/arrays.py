"""Operators that create, draw, cast and fill arrays, and tensor arrays of bounded length.

Arrays on a device have a fixed size, so a tensor array is allocated as `[capacity, ...]`, zero in
elements that were not written, with its length in a separate variable.

Random operators are keyed by a seed of their own and the number of the run.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.ops.fluid.schema import (
    Attributes,
    BySlot,
    Gradient,
    Value,
    define_gradient,
    describe,
    fluid_op,
)
from jaxfleet.ops.jax_adapter import numpy_dtype
from jaxfleet.ops.registry import Array

# Device dtypes while JAX's 64-bit types are off.
ON_DEVICE: Mapping[str, str] = {"int64": "int32", "float64": "float32"}


def device_dtype(name: str) -> np.dtype[Any]:
    """The device dtype for one of fluid's dtypes."""
    return numpy_dtype(ON_DEVICE.get(name, name))


# Computed in `jaxfleet.ops.pserver_ops` and `basic`.
describe("assign", inputs="X", gradient=Gradient("assign", (), ("X",), by=lambda _: {}))
describe("scale", inputs="X", attrs={"scale": 1.0, "bias": 0.0, "bias_after_scale": True},
         gradient=Gradient("scale", (), ("X",),
                           by=lambda attrs: {"scale": attrs["scale"]}))  # fmt: skip
describe("sum", inputs="X*", attrs={"use_mkldnn": False},
         gradient=Gradient("scale", (), ("X",), by=lambda _: {"scale": 1.0}))  # fmt: skip
describe("concat", inputs="X*", attrs={"axis": 0}, gradient="X -> X")
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


def _write_back(attrs: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
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
          gradient="X I XLevels -> X")  # fmt: skip
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


@fluid_op("select_input", inputs="X* Mask", gradient="X Mask -> X")
def select_input(_: Attributes, xs: list[Array], mask: Array) -> Array:
    """Selects a tensor by number."""
    return jax.lax.select_n(mask.reshape(()).astype(jnp.int32), *xs)


@fluid_op("stop_gradient", inputs="X")
def stop_gradient(_: Attributes, x: Array) -> Array:
    """Identity that stops gradients in a block that is differentiated as a whole."""
    return jax.lax.stop_gradient(x)


# `Run` is ours: u32[], the number of the run.
RUN_SLOT = "Run"
RUN = "@RUN@"  # the variable of this input
DRAWS_AS = "draws_as"  # attribute: number that an operator shares with its copies, for equal draws
_DRAWN = {"shape": [1], "dtype": "float32", "seed": 0}
RANDOM_OPS = (
    *("uniform_random", "gaussian_random", "truncated_gaussian_random", "dropout"),
    *("nce", "sample_logits"),
)


def key_of(attrs: Attributes, run: Array | None) -> Array:
    """The key of an operator's draws."""
    key = jax.random.key(attrs["seed"])
    return key if run is None else jax.random.fold_in(key, run)


@fluid_op("uniform_random", inputs="Run?",
          attrs={**_DRAWN, "min": -1.0, "max": 1.0, "diag_num": 0, "diag_step": 0,
                 "diag_val": 1.0})  # fmt: skip
def uniform_random(attrs: Attributes, run: Array | None) -> Array:
    """Uniform samples from `min` to `max`, except for a diagonal of `diag_num` elements."""
    dtype, low, high = device_dtype(attrs["dtype"]), attrs["min"], attrs["max"]
    drawn = jax.random.uniform(key_of(attrs, run), attrs["shape"], dtype, low, high)
    if not attrs["diag_num"]:
        return drawn
    places = jnp.arange(attrs["diag_num"]) * (attrs["diag_step"] + 1)
    return drawn.reshape(-1).at[places].set(attrs["diag_val"]).reshape(drawn.shape)


@fluid_op("gaussian_random", inputs="Run?", attrs={**_DRAWN, "mean": 0.0, "std": 1.0})
def gaussian_random(attrs: Attributes, run: Array | None) -> Array:
    """Normal samples."""
    drawn = jax.random.normal(key_of(attrs, run), attrs["shape"], device_dtype(attrs["dtype"]))
    return drawn * attrs["std"] + attrs["mean"]


@fluid_op("truncated_gaussian_random", inputs="Run?", attrs={**_DRAWN, "mean": 0.0, "std": 1.0})
def truncated_gaussian_random(attrs: Attributes, run: Array | None) -> Array:
    """Normal samples within two deviations."""
    shape, dtype = attrs["shape"], device_dtype(attrs["dtype"])
    drawn = jax.random.truncated_normal(key_of(attrs, run), -2.0, 2.0, shape, dtype)
    return drawn * attrs["std"] + attrs["mean"]


def _dropout_back(attrs: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
    kept = grads["Out"] * reads["Mask"].astype(grads["Out"].dtype)
    return {"X": kept / _kept_share(attrs) if _is_upscaled(attrs) else kept}


@fluid_op("dropout", inputs="X Run?", outputs="Out Mask",
          attrs={"dropout_prob": 0.5, "is_test": False, "fix_seed": False, "seed": 0,
                 "dropout_implementation": "downgrade_in_infer"},
          gradient=Gradient("dropout_grad", ("Mask",), ("X",), _dropout_back))  # fmt: skip
def dropout(attrs: Attributes, x: Array, run: Array | None) -> Value:
    """Sets a share of the elements to zero; in test, scales all by the kept share."""
    if attrs["is_test"]:
        tested = x if _is_upscaled(attrs) else x * (1 - attrs["dropout_prob"])
        return tested, jnp.ones(x.shape, jnp.uint8)
    key = key_of(attrs, None if attrs["fix_seed"] else run)
    mask = jax.random.uniform(key, x.shape) >= attrs["dropout_prob"]
    kept = jnp.where(mask, x / _kept_share(attrs) if _is_upscaled(attrs) else x, 0)
    return kept, mask.astype(jnp.uint8)


def _is_upscaled(attrs: Attributes) -> bool:
    return bool(attrs["dropout_implementation"] == "upscale_in_train")


def _kept_share(attrs: Attributes) -> float:
    return max(1.0 - float(attrs["dropout_prob"]), 1e-20)

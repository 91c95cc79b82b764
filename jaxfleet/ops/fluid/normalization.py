"""Batch, layer, group and data normalization; batch normalization over all devices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfleet.ir import Operator
from jaxfleet.ir.naming import GRAD
from jaxfleet.ops.fluid.schema import (
    Attributes,
    BySlot,
    Gradient,
    Schema,
    Value,
    attributes,
    by_slot,
    declare,
    flat,
    fluid_op,
    schema_of,
)
from jaxfleet.ops.registry import Array, Context, find_op, register_op


def _other_axes(attrs: Attributes, x: Array) -> tuple[int, ...]:
    channels = x.ndim - 1 if attrs["data_layout"] == "NHWC" else 1
    return tuple(axis for axis in range(x.ndim) if axis != channels)


def _uses_kept(attrs: Attributes) -> bool:
    """Whether running averages normalize, instead of the batch's statistics."""
    return bool(attrs["is_test"] or attrs["use_global_stats"])


def _batch_norm_back(attrs: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
    x, grad = reads["X"], grads["Y"]
    axes = _other_axes(attrs, x)
    mean, inverse, scale = (
        jnp.expand_dims(reads[name], axes) for name in ("SavedMean", "SavedVariance", "Scale")
    )
    unit = (x - mean) * inverse
    to_bias, to_scale = jnp.sum(grad, axes), jnp.sum(grad * unit, axes)
    if not _uses_kept(attrs):  # the statistics depend on x too
        count = x.size / to_bias.size
        wide = jnp.expand_dims(to_scale, axes)
        grad = grad - (jnp.expand_dims(to_bias, axes) + unit * wide) / count
    return {"X": grad * scale * inverse, "Scale": to_scale, "Bias": to_bias}


@fluid_op("batch_norm", inputs="X Scale Bias Mean Variance",
          outputs="Y MeanOut VarianceOut SavedMean SavedVariance",
          attrs={"momentum": 0.9, "epsilon": 1e-5, "is_test": False, "data_layout": "NCHW",
                 "use_mkldnn": False, "fuse_with_relu": False, "use_global_stats": False},
          gradient=Gradient("batch_norm_grad",
                            ("X", "Scale", "Bias", "Mean", "Variance", "SavedMean",
                             "SavedVariance"),
                            ("X", "Scale", "Bias"), _batch_norm_back,
                            only_if={"Mean": ("use_global_stats", True),
                                     "Variance": ("use_global_stats", True)}))  # fmt: skip
def batch_norm(
    attrs: Attributes, x: Array, scale: Array, bias: Array, mean: Array, variance: Array
) -> Value:
    """Normalizes each channel by the batch (Ioffe and Szegedy, 2015); updates running averages.

    `SavedVariance` is one over the deviation, as in fluid, for the gradient.
    """
    axes = _other_axes(attrs, x)
    used, spread = mean, variance
    if not _uses_kept(attrs):
        used, spread = jnp.mean(x, axes), jnp.var(x, axes)
        keep = attrs["momentum"]
        mean, variance = keep * mean + (1 - keep) * used, keep * variance + (1 - keep) * spread
    inverse = lax.rsqrt(spread + attrs["epsilon"])
    wide = [jnp.expand_dims(each, axes) for each in (used, inverse, scale, bias)]
    made = (x - wide[0]) * wide[1] * wide[2] + wide[3]
    return made, mean, variance, used, inverse


@fluid_op("layer_norm", inputs="X Scale? Bias?", outputs="Y Mean Variance",
          attrs={"epsilon": 1e-5, "begin_norm_axis": 1},
          gradient="X Scale Bias Mean Variance -> X Scale Bias")  # fmt: skip
def layer_norm(attrs: Attributes, x: Array, scale: Array | None, bias: Array | None) -> Value:
    """Normalizes each row (Ba et al., 2016): the axes before `begin_norm_axis` index the rows."""
    begin = attrs["begin_norm_axis"]
    rows = x.reshape(math.prod(x.shape[:begin]), math.prod(x.shape[begin:]))
    mean, variance = jnp.mean(rows, 1), jnp.var(rows, 1)
    made = (rows - mean[:, None]) * lax.rsqrt(variance[:, None] + attrs["epsilon"])
    made = made if scale is None else made * scale
    made = made if bias is None else made + bias
    return made.reshape(x.shape), mean, variance


@fluid_op("group_norm", inputs="X Scale? Bias?", outputs="Y Mean Variance",
          attrs={"epsilon": 1e-5, "groups": 1, "data_layout": "NCHW"},
          gradient="X Scale Bias Mean Variance -> X Scale Bias")  # fmt: skip
def group_norm(attrs: Attributes, x: Array, scale: Array | None, bias: Array | None) -> Value:
    """Normalizes groups of channels of each row (Wu and He, 2018): f32[b,c,...]."""
    is_last = attrs["data_layout"] == "NHWC"
    first = jnp.moveaxis(x, -1, 1) if is_last else x
    count, groups = first.shape[0], attrs["groups"]
    rows = first.reshape(count, groups, math.prod(first.shape[1:]) // groups)
    mean, variance = jnp.mean(rows, 2), jnp.var(rows, 2)
    made = (rows - mean[..., None]) * lax.rsqrt(variance[..., None] + attrs["epsilon"])
    made = made.reshape(first.shape)
    wide = (1, -1, *[1] * (x.ndim - 2))
    made = made if scale is None else made * scale.reshape(wide)
    made = made if bias is None else made + bias.reshape(wide)
    return jnp.moveaxis(made, 1, -1) if is_last else made, mean, variance


@fluid_op("norm", inputs="X", outputs="Out Norm", attrs={"axis": -1, "epsilon": 1e-10},
          gradient="X Norm -> X")  # fmt: skip
def norm(attrs: Attributes, x: Array) -> Value:
    """Divides by the L2 norm along an axis."""
    length = jnp.sqrt(jnp.sum(x * x, attrs["axis"], keepdims=True) + attrs["epsilon"])
    return x / length, length


@fluid_op("cos_sim", inputs="X Y", outputs="Out XNorm YNorm", gradient="X Y Out XNorm YNorm -> X Y")
def cos_sim(_: Attributes, x: Array, y: Array) -> Value:
    """Cosine similarity of rows: f32[b,n], f32[b,n] or f32[1,n] -> f32[b,1]."""
    lengths = [jnp.sqrt(jnp.sum(v * v, 1, keepdims=True)) for v in (x, y)]
    return jnp.sum(x * y, 1, keepdims=True) / (lengths[0] * lengths[1]), *lengths


def _data_norm_back(attrs: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
    """The batch's increments of counts and sums, instead of their gradients."""
    x, mean = reads["X"], reads["Means"]
    count = jnp.full(mean.shape, x.shape[0], mean.dtype)
    squares = jnp.sum(jnp.square(x - mean), 0) + count * attrs["epsilon"]
    made = {"BatchSize": count, "BatchSum": jnp.sum(x, 0), "BatchSquareSum": squares}
    return {"X": grads["Y"] * reads["Scales"], **made}


@fluid_op("data_norm", inputs="X BatchSize BatchSum BatchSquareSum", outputs="Y Means Scales",
          attrs={"epsilon": 1e-4, "data_layout": "NCHW", "use_mkldnn": False, "slot_dim": -1,
                 "sync_stats": False, "summary_decay_rate": 0.9999999},
          gradient=Gradient("data_norm_grad", ("X", "Means", "Scales"),
                            ("X", "BatchSize", "BatchSum", "BatchSquareSum"),
                            _data_norm_back))  # fmt: skip
def data_norm(_: Attributes, x: Array, size: Array, total: Array, squares: Array) -> Value:
    """Normalizes each column by all rows so far: their count, sum, and squares of deviations."""
    means, scales = total / size, jnp.sqrt(size / squares)
    return (x - means) * scales, means, scales


def _described(op_type: str) -> Schema:
    """Declares the schema of an operator from that of its unsynchronized form."""
    like = schema_of(op_type)
    assert like is not None
    return declare(Schema(f"sync_{op_type}", like.inputs, like.outputs, like.attrs))


_FORWARD, _BACKWARD = _described("batch_norm"), _described("batch_norm_grad")


@register_op("sync_batch_norm", is_collective=True)
def sync_batch_norm(ctx: Context, op: Operator, values: Sequence[Array]) -> Sequence[Array]:
    """`batch_norm` by the mean and variance over the rows of all devices."""
    attrs = attributes(ctx, op, _FORWARD)
    if attrs["is_test"] or attrs["use_global_stats"]:
        return find_op("batch_norm").meaning(ctx, op, values)
    held = by_slot(_FORWARD.inputs, op, values)
    x, keep = held["X"], attrs["momentum"]
    made, mean, spread, inverse = _normalized(ctx, attrs, x, held["Scale"], held["Bias"])
    outputs = {
        "Y": made,
        "MeanOut": keep * held["Mean"] + (1 - keep) * mean,
        "VarianceOut": keep * held["Variance"] + (1 - keep) * spread,
        "SavedMean": mean,
        "SavedVariance": inverse,
    }
    return flat(op, outputs)


@register_op("sync_batch_norm_grad", is_collective=True)
def sync_batch_norm_grad(ctx: Context, op: Operator, values: Sequence[Array]) -> Sequence[Array]:
    """Differentiates it, also through the mean and variance that devices share."""
    attrs = attributes(ctx, op, _BACKWARD)
    if attrs["use_global_stats"]:
        return find_op("batch_norm_grad").meaning(ctx, op, values)
    held = by_slot(_BACKWARD.inputs, op, values)
    x, scale = held["X"], held["Scale"]
    bias = jnp.zeros_like(scale) if held.get("Bias") is None else held["Bias"]

    def run(x: Array, scale: Array, shift: Array) -> Array:
        return _normalized(ctx, attrs, x, scale, shift)[0]

    _, pull = jax.vjp(run, x, scale, bias)
    found = pull(held["Y" + GRAD])
    return flat(op, {name + GRAD: x for name, x in zip(("X", "Scale", "Bias"), found, strict=True)})


def _normalized(
    ctx: Context, attrs: Mapping[str, Any], x: Any, scale: Any, bias: Any
) -> tuple[Array, Array, Array, Array]:
    """The normalized rows, the mean, the variance, and one over the deviation."""
    channel = 1 if attrs["data_layout"] == "NCHW" else x.ndim - 1
    axes = tuple(axis for axis in range(x.ndim) if axis != channel)
    own = jnp.mean(x, axes)
    mean = _over_devices(ctx, own)
    spread = _over_devices(ctx, jnp.var(x, axes) + (own - mean) ** 2)
    inverse = lax.rsqrt(spread + attrs["epsilon"])
    wide = [jnp.expand_dims(each, axes) for each in (mean, inverse, scale, bias)]
    return (x - wide[0]) * wide[1] * wide[2] + wide[3], mean, spread, inverse


def _over_devices(ctx: Context, value: Array) -> Array:
    """The mean over devices, which have equally many rows: that of all rows."""
    return value if ctx.axis_name is None else lax.pmean(value, ctx.axis_name)

"""Batch normalization by the rows of all devices: BuildStrategy.sync_batch_norm."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfleet.ir import Operator
from jaxfleet.ir.names import GRAD
from jaxfleet.ops.fluid.schema import (
    Schema,
    attributes,
    by_slot,
    describe,
    flat,
    schema_of,
)
from jaxfleet.ops.registry import Array, Context, find_op, register_op


def _schema(op_type: str) -> Schema:
    found = schema_of(op_type)
    assert found is not None
    return found


def _described(op_type: str) -> Schema:
    """Says that an operator looks like the one that is not synchronized."""
    like = _schema(op_type)
    made = Schema(f"sync_{op_type}", like.inputs, like.outputs, like.attrs)
    describe(made)
    return made


_FORWARD, _BACKWARD = _described("batch_norm"), _described("batch_norm_grad")


@register_op("sync_batch_norm", is_collective=True)
def sync_batch_norm(ctx: Context, op: Operator, values: Sequence[Array]) -> Sequence[Array]:
    """Normalizes as `batch_norm`, by the mean and variance over the rows of all devices."""
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
    """Differentiates that, through the mean and variance that devices have in common."""
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
    """Returns the normalized rows, the mean, the variance, and one over the deviation."""
    channel = 1 if attrs["data_layout"] == "NCHW" else x.ndim - 1
    axes = tuple(axis for axis in range(x.ndim) if axis != channel)
    own = jnp.mean(x, axes)
    mean = _over_devices(ctx, own)
    spread = _over_devices(ctx, jnp.var(x, axes) + (own - mean) ** 2)
    inverse = lax.rsqrt(spread + attrs["epsilon"])
    wide = [jnp.expand_dims(each, axes) for each in (mean, inverse, scale, bias)]
    return (x - wide[0]) * wide[1] * wide[2] + wide[3], mean, spread, inverse


def _over_devices(ctx: Context, value: Array) -> Array:
    """Returns the mean over devices, which have equally many rows: that of all rows."""
    return value if ctx.axis_name is None else lax.pmean(value, ctx.axis_name)

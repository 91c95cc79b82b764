"""Collectives, and the operators that draw or count a device's own rows.

All of them run inside `shard_map` over one mesh axis; on a single device they are identities.
Fluid's names; jax's operations.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random as raw

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator
from jaxfleet.ops.jax_adapter import decode, numpy_dtype
from jaxfleet.ops.registry import Array, Context, register_op

_LOW_BITS = 0xFFFFFFFF


def _attr(ctx: Context, op: Operator, name: str) -> Any:
    return decode(op.attrs.get(name), ctx.size)


def _allreduce(reduce: Callable[[Any, str], Any]) -> Callable[..., Sequence[Array]]:
    def meaning(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
        if ctx.axis_name is None:
            return list(inputs)
        if op.attrs.get("flat"):
            return _flat(inputs, lambda buffer: reduce(buffer, str(ctx.axis_name)))
        return [reduce(value, ctx.axis_name) for value in inputs]

    return meaning


def _flat(inputs: Sequence[Array], reduce: Callable[[Array], Array]) -> Sequence[Array]:
    """Reduces several arrays as one buffer."""
    buffer = reduce(jnp.concatenate([jnp.ravel(value) for value in inputs]))
    ends = np.cumsum([value.size for value in inputs])[:-1]
    parts = jnp.split(buffer, ends)
    return [part.reshape(value.shape) for part, value in zip(parts, inputs, strict=True)]


def _logical(reduce: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda value, axis: reduce(value.astype(jnp.int32), axis).astype(value.dtype)


def _product(value: Array, axis: str) -> Array:
    return jnp.prod(lax.all_gather(value, axis), axis=0)


def _average(value: Array, axis: str) -> Array:
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return lax.pmean(value, axis)
    return lax.pmax(value, axis)


for _name, _reduce in {
    "sum": lax.psum,
    "max": lax.pmax,
    "min": lax.pmin,
    "prod": _product,
    "avg": _average,
    "and": _logical(lax.pmin),
    "or": _logical(lax.pmax),
}.items():
    register_op(f"c_allreduce_{_name}", is_collective=True)(_allreduce(_reduce))


@register_op("c_allgather", is_collective=True)
def allgather(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Joins all devices' rows, in the order of the devices."""
    if ctx.axis_name is None:
        return list(inputs)
    return [lax.all_gather(inputs[0], ctx.axis_name, axis=_attr(ctx, op, "axis"), tiled=True)]


@register_op("c_reducescatter", is_collective=True)
def reducescatter(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Completes a sum and keeps this device's rows of it."""
    if ctx.axis_name is None:
        return list(inputs)
    axis = _attr(ctx, op, "axis")
    return [lax.psum_scatter(inputs[0], ctx.axis_name, scatter_dimension=axis, tiled=True)]


@register_op("c_split")
def split(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Keeps this device's rows of what every device has."""
    if ctx.axis_name is None:
        return list(inputs)
    axis, devices = _attr(ctx, op, "axis"), _attr(ctx, op, "devices")
    rows = inputs[0].shape[axis] // devices
    start = lax.axis_index(ctx.axis_name) * rows
    return [lax.dynamic_slice_in_dim(inputs[0], start, rows, axis)]


@register_op("c_summand")
def summand(ctx: Context, _: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Makes what every device has a sum that has it once: the first device keeps it."""
    if ctx.axis_name is None:
        return list(inputs)
    value = jnp.asarray(inputs[0])
    return [jnp.where(lax.axis_index(ctx.axis_name) == 0, value, jnp.zeros_like(value))]


@register_op("c_local")
def local(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Scales a device's summand up to stand for the whole sum: local batch statistics."""
    if ctx.axis_name is None:
        return list(inputs)
    return [inputs[0] * jnp.asarray(_attr(ctx, op, "devices"), inputs[0].dtype)]


@register_op("c_iota")
def iota(ctx: Context, op: Operator, _: Sequence[Array]) -> Sequence[Array]:
    """Counts this device's rows from where they start in the whole batch."""
    shape, dimension = _attr(ctx, op, "shape"), _attr(ctx, op, "dimension")
    counted = lax.broadcasted_iota(_attr(ctx, op, "dtype"), shape, dimension)
    if ctx.axis_name is None:
        return [counted]
    start = lax.axis_index(ctx.axis_name) * shape[dimension]
    return [counted + start.astype(counted.dtype)]


@register_op("c_random_bits")
def random_bits(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Draws this device's rows of the bits that one device would draw.

    The counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
    (SC 2011), as jax runs it: element i of the whole is threefry2x32 of the key and i.
    """
    key, shape, width = inputs[0], _attr(ctx, op, "shape"), _attr(ctx, op, "bit_width")
    if not _is_counter_based(key):
        return [jax.random.bits(_own_key(ctx, key), shape, f"uint{width}")]
    high, low = _draw(ctx, op, key, shape)
    if width == 64:  # noqa: PLR2004  # the width of both words
        return [(high.astype(jnp.uint64) << 32) | low.astype(jnp.uint64)]
    return [(high ^ low).astype(numpy_dtype(f"u{width}"))]


@register_op("c_random_split")
def random_split(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Makes this device's rows of the keys that one device would make."""
    key, shape = inputs[0], _attr(ctx, op, "shape")
    if not _is_counter_based(key):
        return [jax.random.split(_own_key(ctx, key), shape)]
    data = jnp.stack(_draw(ctx, op, key, shape), axis=-1)
    return [jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))]


def _is_counter_based(key: Array) -> bool:
    is_threefry = str(jax.random.key_impl(key)) in {"threefry2x32", "fry"}
    return is_threefry and bool(jax.config.jax_threefry_partitionable)


def _own_key(ctx: Context, key: Array) -> Array:
    return key if ctx.axis_name is None else jax.random.fold_in(key, lax.axis_index(ctx.axis_name))


def _draw(ctx: Context, op: Operator, key: Array, shape: Sequence[int]) -> tuple[Array, Array]:
    """Returns both words of threefry on the counters of this device's rows."""
    axis, devices = _attr(ctx, op, "rows_axis"), _attr(ctx, op, "devices")
    whole = list(shape)
    whole[axis] *= devices
    stride = prod(whole[axis + 1 :])
    starts = [device * shape[axis] * stride for device in range(devices)]
    device = 0 if ctx.axis_name is None else lax.axis_index(ctx.axis_name)
    low_start = jnp.asarray([start & _LOW_BITS for start in starts], jnp.uint32)[device]
    high_start = jnp.asarray([start >> 32 for start in starts], jnp.uint32)[device]
    counted = _counters(shape, whole, axis)
    low = counted + low_start
    high = high_start + (low < counted).astype(jnp.uint32)
    data = jax.random.key_data(key)
    words = raw.threefry2x32_p.bind(data[0], data[1], high, low)
    return words[0], words[1]


def _counters(shape: Sequence[int], whole: Sequence[int], axis: int) -> Array:
    """Returns the places of a block's elements in the whole, less where the block starts."""
    if axis == 0:
        return lax.iota(jnp.uint32, prod(shape)).reshape(shape)
    if prod(whole) > _LOW_BITS:
        what = f"random bits of {list(whole)} cut along axis {axis} need counters over 32 bits"
        raise ProgramError(what, hint="draw with the batch as the first axis")
    places = jnp.zeros(shape, jnp.uint32)
    for place in range(len(shape)):
        step = np.uint32(prod(whole[place + 1 :]))
        places = places + lax.broadcasted_iota(jnp.uint32, shape, place) * step
    return places

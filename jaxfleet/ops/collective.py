"""Collectives: fluid's names, JAX's operations.

A backend's own all-reduce may drop a nan, which one device never does. So floats are sent as
integers in the same order, nan before or after all of them.

All collectives run inside `shard_map` over one mesh axis; on a single device they are identities.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfleet.ir import Operator
from jaxfleet.ops.jax_adapter import decode
from jaxfleet.ops.registry import Array, Context, register_op


def max_over(value: Array, axis: str) -> Array:
    """Returns the largest over the devices, nan if one has nan."""
    return _extreme(value, axis, largest=True)


def min_over(value: Array, axis: str) -> Array:
    """Returns the smallest over the devices, nan if one has nan."""
    return _extreme(value, axis, largest=False)


def _extreme(value: Array, axis: str, *, largest: bool) -> Array:
    reduce: Callable[..., Array] = lax.pmax if largest else lax.pmin
    if value.dtype == bool:
        return reduce(value.astype(jnp.int32), axis).astype(bool)
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        reduce_axis = lax.reduce_max if largest else lax.reduce_min
        return reduce_axis(lax.all_gather(value, axis), axes=(0,))
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return reduce(value, axis)
    wide = value if value.dtype.itemsize >= 4 else value.astype(np.float32)
    found = reduce(_as_integer(wide, largest=largest), axis)
    return _as_float(found, wide.dtype).astype(value.dtype)


def _as_integer(value: Array, *, largest: bool) -> Array:
    """Returns integers in the order of floats; the order of negative floats is reversed."""
    kind = np.dtype(f"int{8 * value.dtype.itemsize}")
    bits = lax.bitcast_convert_type(value, kind)
    most = np.iinfo(kind).max
    ordered = jnp.where(bits < 0, bits ^ most, bits)
    return jnp.where(jnp.isnan(value), most if largest else np.iinfo(kind).min, ordered)


def _as_float(ordered: Array, dtype: Any) -> Array:
    """Undoes `_as_integer`: the extreme integers are not numbers."""
    bits = jnp.where(ordered < 0, ordered ^ np.iinfo(ordered.dtype).max, ordered)
    return lax.bitcast_convert_type(bits, dtype)


def attr(ctx: Context, op: Operator, name: str) -> Any:
    """Returns an operator's attribute with a number for every letter."""
    return decode(op.attrs.get(name), ctx.size)


def _allreduce(reduce: Callable[[Any, str], Any]) -> Callable[..., Sequence[Array]]:
    def meaning(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
        if (axis := ctx.axis_name) is None:
            return list(inputs)
        one = _exchanged if op.attrs.get("exchange") else _in_levels(op, reduce)
        if op.attrs.get("flat"):
            return _flat(inputs, lambda buffer: one(buffer, axis))
        return [one(value, axis) for value in inputs]

    return meaning


def _exchanged(value: Array, axis: str) -> Array:
    """Sums over 2, 4, 8, ... devices: each adds its partner's value, at growing distance."""
    devices, device = lax.axis_size(axis), lax.axis_index(axis)
    apart = 1
    while apart < devices:
        theirs = lax.ppermute(value, axis, [(i, i ^ apart) for i in range(devices)])
        # Both add in the same order, and the summand is the result of a select: a product here
        # could be rounded once with its sum, but on one side only, and devices would drift apart.
        is_first = (device & apart) == 0
        value = jnp.where(is_first, value, theirs) + jnp.where(is_first, theirs, value)
        apart *= 2
    return value


def _flat(inputs: Sequence[Array], reduce: Callable[[Array], Array]) -> Sequence[Array]:
    """Reduces several arrays as one buffer."""
    buffer = reduce(jnp.concatenate([jnp.ravel(value) for value in inputs]))
    ends = np.cumsum([value.size for value in inputs])[:-1]
    parts = jnp.split(buffer, ends)
    return [part.reshape(value.shape) for part, value in zip(parts, inputs, strict=True)]


def _in_levels(op: Operator, reduce: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Returns the reduction; for an operator with `within`, one of two levels."""
    within = op.attrs.get("within")
    if not isinstance(within, int) or reduce not in {lax.psum, _average}:
        return reduce

    def run(value: Array, axis: str) -> Array:
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return reduce(value, axis)
        total = _two_levels(value, axis, within)
        return total / lax.psum(1, axis) if reduce is _average else total

    return run


def _two_levels(value: Array, axis: str, within: int) -> Array:
    """Reduces to parts over neighbours, sums over groups, and gathers the parts."""
    devices = int(lax.psum(1, axis))
    groups = [list(range(first, first + within)) for first in range(0, devices, within)]
    across = [list(members) for members in zip(*groups, strict=True)]
    flat = jnp.ravel(value)
    flat = jnp.pad(flat, (0, -flat.size % within))
    part = lax.psum_scatter(flat, axis, scatter_dimension=0, tiled=True, axis_index_groups=groups)
    part = lax.psum(part, axis, axis_index_groups=across)
    whole = lax.all_gather(part, axis, axis=0, tiled=True, axis_index_groups=groups)
    return whole[: value.size].reshape(value.shape)


def _gathered(reduce: Callable[..., Array]) -> Callable[[Any, str], Any]:
    """Gathers and reduces on every device, for reductions without a collective of their own."""
    return lambda value, axis: reduce(lax.all_gather(value, axis), axes=(0,))


def _average(value: Array, axis: str) -> Array:
    """Averages numbers; for integers and booleans, which have no average, it takes the largest."""
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return lax.pmean(value, axis)
    return max_over(value, axis)


for _name, _reduce in {
    "sum": lax.psum,
    "max": max_over,
    "min": min_over,
    "prod": _gathered(lax.reduce_prod),
    "avg": _average,
    "and": _gathered(lax.reduce_and),
    "or": _gathered(lax.reduce_or),
    "xor": _gathered(lax.reduce_xor),
}.items():
    register_op(f"c_allreduce_{_name}")(_allreduce(_reduce))


@register_op("c_allgather")
def allgather(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Joins all devices' rows, in the order of the devices; fluid's is along axis 0."""
    axis, name = attr(ctx, op, "axis") or 0, ctx.axis_name
    if name is None:
        return list(inputs)
    return [_on_data(lambda x: lax.all_gather(x, name, axis=axis, tiled=True), inputs[0])]


@register_op("c_reducescatter")
def reducescatter(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Completes a sum and keeps this device's rows of it."""
    if ctx.axis_name is None:
        return list(inputs)
    axis = attr(ctx, op, "axis") or 0
    return [lax.psum_scatter(inputs[0], ctx.axis_name, scatter_dimension=axis, tiled=True)]


@register_op("c_broadcast")
def broadcast(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Sends the value of device `root` to every device."""
    if ctx.axis_name is None:
        return list(inputs)
    is_root, axis = ctx.device == attr(ctx, op, "root"), ctx.axis_name
    return [_on_data(lambda x: _from_one(x, is_root, axis), value) for value in inputs]


def _from_one(value: Array, is_root: Array, axis: str) -> Array:
    """Sums one device's value and the others' zeros: exact, except for the sign of a zero."""
    summed = lax.psum(jnp.where(is_root, value, jnp.zeros_like(value)), axis)
    return summed.astype(value.dtype)  # booleans are summed as numbers


@register_op("c_alltoall")
def alltoall(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Moves the cut from `from_axis` to `axis`."""
    axis, from_axis, name = attr(ctx, op, "axis"), attr(ctx, op, "from_axis"), ctx.axis_name
    if name is None:
        return list(inputs)
    return [_on_data(lambda x: lax.all_to_all(x, name, axis, from_axis, tiled=True), inputs[0])]


@register_op("c_split")
def split(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Keeps this device's rows of a replicated value."""
    if ctx.device is None:
        return list(inputs)
    axis, devices = attr(ctx, op, "axis"), attr(ctx, op, "devices")
    rows = inputs[0].shape[axis] // devices
    start = ctx.device * rows
    return [lax.dynamic_slice_in_dim(inputs[0], start, rows, axis)]


@register_op("c_summand")
def summand(ctx: Context, _: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Makes a replicated value a sum that counts it once: the first device keeps it."""
    if ctx.device is None:
        return list(inputs)
    value = jnp.asarray(inputs[0])
    return [jnp.where(ctx.device == 0, value, jnp.zeros_like(value))]


@register_op("c_complete")
def complete(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Requires all of a value on every device; labels ensure it."""
    return list(inputs)


@register_op("c_local")
def local(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Scales a device's summand up to represent the whole sum: local batch statistics."""
    if ctx.device is None:
        return list(inputs)
    return [inputs[0] * jnp.asarray(attr(ctx, op, "devices"), inputs[0].dtype)]


@register_op("c_sync_calc_stream")
def sync_calc_stream(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Allows communication of computed values; XLA derives that itself."""
    return list(inputs)


@register_op("c_sync_comm_stream")
def sync_comm_stream(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Allows reading of communicated values; XLA derives that itself."""
    return list(inputs)


def _handle(_: Context, op: Operator, __: Sequence[Array]) -> Sequence[Array]:
    """Creates a communicator: the device mesh already is one, so its handle is a number."""
    return [jnp.zeros((), jnp.int32)] * len(op.writes)


for _name in ("c_gen_nccl_id", "c_comm_init", "c_comm_init_all", "gen_nccl_id"):
    register_op(_name)(_handle)


def _on_data(move: Callable[[Array], Array], value: Array) -> Array:
    """Moves an array between devices; of random keys, which cannot be sent, the data."""
    if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return move(value)
    data = move(jax.random.key_data(value))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))

"""Random bits and counters of which a device makes only its own rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random as raw

from jaxfleet.ir import Operator
from jaxfleet.ops.collective import attr
from jaxfleet.ops.jax_adapter import numpy_dtype
from jaxfleet.ops.registry import Array, Context, register_op

Words: TypeAlias = tuple[Array, Array]  # the high and the low 32 bits of 64


@register_op("c_iota")
def iota(ctx: Context, op: Operator, _: Sequence[Array]) -> Sequence[Array]:
    """Counts this device's rows from their start in the whole batch."""
    shape, dimension = attr(ctx, op, "shape"), attr(ctx, op, "dimension")
    counted = lax.broadcasted_iota(np.int32, shape, dimension)
    if ctx.device is not None:
        counted += ctx.device * shape[dimension]
    return [counted.astype(attr(ctx, op, "dtype"))]


@register_op("c_random_bits")
def random_bits(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Draws this device's rows of the bits that one device would draw.

    The counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
    (SC 2011), as jax runs it: element i of the whole is threefry2x32 of the key and i.
    """
    rows, width = _Rows.of(ctx, op), attr(ctx, op, "bit_width")
    if not _is_threefry(inputs[0]):
        return [jax.random.bits(_own_key(ctx, inputs[0]), rows.shape, f"uint{width}")]
    if not jax.threefry_partitionable.value:
        return [rows.cut(jax.random.bits(inputs[0], rows.whole, f"uint{width}"))]
    high, low = rows.draw(inputs[0])
    if width == 64:
        return [(high.astype(np.uint64) << 32) | low.astype(np.uint64)]
    return [(high ^ low).astype(numpy_dtype(f"u{width}"))]


@register_op("c_random_split")
def random_split(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Makes this device's rows of the keys that one device would make."""
    rows, key = _Rows.of(ctx, op), inputs[0]
    if not _is_threefry(key):
        return [jax.random.split(_own_key(ctx, key), rows.shape)]
    if not jax.threefry_partitionable.value:
        return [rows.cut(jax.random.split(key, rows.whole))]
    data = jnp.stack(rows.draw(key), axis=-1)
    return [jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))]


def _is_threefry(key: Array) -> bool:
    return str(jax.random.key_impl(key)) in {"threefry2x32", "fry"}


def _own_key(ctx: Context, key: Array) -> Array:
    return key if ctx.device is None else jax.random.fold_in(key, ctx.device)


@dataclass(frozen=True)
class _Rows:
    """A device's part of an array that is cut along one axis."""

    shape: tuple[int, ...]  # of the part
    axis: int  # the axis that is cut
    devices: int  # the number of devices
    device: Array  # the index of this device

    @classmethod
    def of(cls, ctx: Context, op: Operator) -> "_Rows":
        device = 0 if ctx.device is None else ctx.device
        shape, axis = attr(ctx, op, "shape"), attr(ctx, op, "rows_axis")
        return cls(tuple(shape), axis, attr(ctx, op, "devices"), jnp.asarray(device, np.uint32))

    @property
    def whole(self) -> tuple[int, ...]:
        shape = list(self.shape)
        shape[self.axis] *= self.devices
        return tuple(shape)

    def cut(self, value: Array) -> Array:
        """Returns the part of a whole; axes of key batches precede those of the shape."""
        rows, axis = self.shape[self.axis], self.axis - len(self.shape)
        start = self.device.astype(np.int32) * rows
        return lax.dynamic_slice_in_dim(value, start, rows, value.ndim + axis)

    def draw(self, key: Array) -> tuple[Array, Array]:
        """Returns both words of threefry on the counters of the part, for one key or for each."""
        data = jax.random.key_data(key)
        first, second, (high, low) = data[..., 0], data[..., 1], self.counters()
        if key.ndim:
            shape = (*key.shape, *self.shape)
            first, second = (
                jnp.broadcast_to(word.reshape(*key.shape, *[1] * len(self.shape)), shape)
                for word in (first, second)
            )
            high, low = jnp.broadcast_to(high, shape), jnp.broadcast_to(low, shape)
        high, low = raw.threefry2x32_p.bind(first, second, high, low)
        return high, low

    def counters(self) -> Words:
        """Returns the positions in the whole of the part's elements, as high and low words."""
        run = prod(self.shape[self.axis :])
        if prod(self.whole) > 1 << 32:
            return self._wide_counters(run)
        low = self.device * np.uint32(run) + self._places()
        return jnp.zeros_like(low), low

    def _places(self) -> Array:
        """Returns the low words of the positions, as if this were the first device."""
        if self.axis == 0:
            return lax.iota(np.uint32, prod(self.shape)).reshape(self.shape)
        strides = [np.uint32(prod(self.whole[axis + 1 :])) for axis in range(len(self.shape))]
        indices = (lax.broadcasted_iota(np.uint32, self.shape, i) for i in range(len(strides)))
        return sum(index * stride for index, stride in zip(indices, strides, strict=True))

    def _wide_counters(self, run: int) -> Words:
        start = _multiply(self.device, run)
        total = (jnp.broadcast_to(start[0], self.shape), jnp.broadcast_to(start[1], self.shape))
        for axis in range(len(self.shape)):
            index = lax.broadcasted_iota(np.uint32, self.shape, axis)
            total = _add(total, _multiply(index, prod(self.whole[axis + 1 :])))
        return total


def _add(x: Words, y: Words) -> Words:
    low = x[1] + y[1]
    return x[0] + y[0] + (low < y[1]).astype(np.uint32), low


def _multiply(x: Array, factor: int) -> Words:
    """Multiplies 32 bits by a number below 2**48, in parts of 16 bits."""
    high, low = jnp.zeros_like(x), jnp.zeros_like(x)
    for shift in (0, 16, 32):
        part = np.uint32((factor >> shift) & 0xFFFF)
        if part == 0:
            continue
        small, large = (x & 0xFFFF) * part, (x >> 16) * part
        high, low = _add((high, low), _shifted(small, shift))
        high, low = _add((high, low), _shifted(large, shift + 16))
    return high, low


def _shifted(x: Array, shift: int) -> Words:
    if shift >= 32:
        return x << (shift - 32), jnp.zeros_like(x)
    return (x >> (32 - shift) if shift else jnp.zeros_like(x)), x << shift

"""The largest and the smallest over devices, where one that is not a number outdoes them all.

A backend's own all-reduce may drop a nan, which one device never does. So floats travel as
integers in the same order, nan before or behind all of them.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfleet.ops.registry import Array


def max_over(value: Array, axis: str) -> Array:
    """Returns the largest over the devices, nan where one has nan."""
    return _extreme(value, axis, largest=True)


def min_over(value: Array, axis: str) -> Array:
    """Returns the smallest over the devices, nan where one has nan."""
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
    """Returns integers in the order of floats; negative floats have their order turned round."""
    kind = np.dtype(f"int{8 * value.dtype.itemsize}")
    bits = lax.bitcast_convert_type(value, kind)
    most = np.iinfo(kind).max
    ordered = jnp.where(bits < 0, bits ^ most, bits)
    return jnp.where(jnp.isnan(value), most if largest else np.iinfo(kind).min, ordered)


def _as_float(ordered: Array, dtype: Any) -> Array:
    """Undoes `_as_integer`: the extreme integers are not numbers."""
    bits = jnp.where(ordered < 0, ordered ^ np.iinfo(ordered.dtype).max, ordered)
    return lax.bitcast_convert_type(bits, dtype)

"""Takes arrays from the host to the device and back, and says whether that copied them.

On a CPU an array whose memory is aligned to 64 bytes is shared, both ways. Keys of random numbers
are on the host what they are made of: `u32` with an axis more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Variable
from jaxfleet.ops import Array
from jaxfleet.ops.jax_adapter import numpy_dtype

# The IR's name of a key's dtype: its implementation, and how many numbers a key is.
_KEYS: Mapping[str, tuple[str, int]] = {
    "key<fry>": ("threefry2x32", 2),
    "key<rbg>": ("rbg", 4),
    "key<urbg>": ("unsafe_rbg", 4),
}


@dataclass(frozen=True)
class HostType:
    """What an array of a variable is on the host.

    Attributes:
        dtype: numpy's.
        shape: numbers.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def host_type(variable: Variable) -> HostType:
    """Returns what a variable's arrays are on the host.

    Raises:
        ProgramError: its sizes are not numbers, or the host has no such dtype.
    """
    sizes = [size for size in variable.shape if isinstance(size, int)]
    if len(sizes) != len(variable.shape):
        raise ProgramError(f"'{variable.name}' is {variable.type}, which has letters for sizes")
    if variable.dtype in _KEYS:
        return HostType(np.dtype(np.uint32), (*sizes, _KEYS[variable.dtype][1]))
    return HostType(numpy_dtype(variable.dtype), tuple(sizes))


def device_dtype(dtype: str) -> Any:
    """Returns jax's dtype of an IR name, keys of random numbers included."""
    if dtype in _KEYS:
        return jax.random.key(0, impl=_KEYS[dtype][0]).dtype
    return numpy_dtype(dtype)


def to_device(array: np.ndarray, dtype: str) -> tuple[Array, bool]:
    """Returns an array on the device, and whether it was copied to get there.

    What is shared must not change for as long as the device's array is used.
    """
    if dtype in _KEYS:
        return jax.random.wrap_key_data(jax.device_put(array), impl=_KEYS[dtype][0]), True
    value = jax.device_put(array)
    return value, array.size > 0 and _address(value) != array.ctypes.data


def to_host(value: Array) -> tuple[np.ndarray, bool]:
    """Returns a device's array on the host, read-only, and whether it was copied.

    Waits until it is computed.
    """
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value)), True
    array = np.asarray(value)
    return array, array.size > 0 and _address(value) != array.ctypes.data


def _address(value: Array) -> int:
    """Returns where an array is in memory, or 0 on several devices or one that does not say."""
    first, *others = value.devices()
    known = first.platform == "cpu" and not others
    return int(value.unsafe_buffer_pointer()) if known else 0

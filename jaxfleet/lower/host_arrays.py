"""Takes arrays from the host to the device and back, and says whether that copied them.

On a CPU an array whose memory is aligned to 64 bytes is shared, both ways. Keys of random numbers
are on the host what they are made of: `u32` with an axis more.
"""

from collections.abc import Mapping, Sequence
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
    if is_key(variable.dtype):
        return HostType(np.dtype(np.uint32), (*sizes, _KEYS[variable.dtype][1]))
    return HostType(numpy_dtype(variable.dtype), tuple(sizes))


def is_key(dtype: str) -> bool:
    """Tells whether an IR name is that of keys of random numbers: the host has none."""
    return dtype in _KEYS


def device_dtype(dtype: str) -> Any:
    """Returns jax's dtype of an IR name, keys of random numbers included."""
    if is_key(dtype):
        return jax.random.key(0, impl=_KEYS[dtype][0]).dtype
    return numpy_dtype(dtype)


def to_device(array: np.ndarray, dtype: str) -> tuple[Array, bool]:
    """Returns an array on the device, and whether it was copied to get there.

    What is shared must not change for as long as the device's array is used.
    """
    ((value, copied),) = all_to_device([(array, dtype)])
    return value, copied


def all_to_device(arrays: Sequence[tuple[np.ndarray, str]]) -> list[tuple[Array, bool]]:
    """Returns what `to_device` does for each, sooner: they go in one call."""
    found: list[tuple[Array, bool]] = []
    values = jax.device_put([array for array, _ in arrays])
    for value, (array, dtype) in zip(values, arrays, strict=True):
        if is_key(dtype):
            found.append((jax.random.wrap_key_data(value, impl=_KEYS[dtype][0]), True))
        else:
            found.append((value, _is_apart(value, array)))
    return found


def to_host(value: Array) -> tuple[np.ndarray, bool]:
    """Returns a device's array on the host, read-only, and whether it was copied.

    Waits until it is computed.
    """
    if not isinstance(value.dtype, np.dtype):  # a key's is jax's own
        return np.asarray(jax.random.key_data(value)), True
    array = np.asarray(value)
    return array, _is_apart(value, array)


def _is_apart(value: Array, array: np.ndarray) -> bool:
    """Tells whether a device's array and one of the host are not in the same memory."""
    if not array.size:
        return False
    try:
        address = value.unsafe_buffer_pointer()
    except (ValueError, RuntimeError):  # it is on several devices, or on one that does not say
        return True
    return bool(address != array.__array_interface__["data"][0])

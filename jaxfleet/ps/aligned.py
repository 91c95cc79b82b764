"""Buffers that a device on the host shares instead of copying: aligned to 64 bytes."""

import math
from typing import Any

import numpy as np

ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Returns an array of any content whose memory is aligned."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """Returns a copy whose memory is aligned."""
    copy = aligned_empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def is_aligned(array: np.ndarray) -> bool:
    """Tells whether an array can be shared as it is: aligned, and in C order."""
    return array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0

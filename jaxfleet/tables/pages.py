"""Large arrays in pages of their own, which the system has back when the array goes.

What an allocator keeps for later is no small part of a table that grew by freeing and taking
ever larger arrays.
"""

import mmap

import numpy as np

_LEAST_BYTES = 1 << 18  # smaller ones are left to the allocator
_HUGE_BYTES = 1 << 22  # from which on pages of 2 MB pay: a look-up then misses few of them


def zeros(count: int, dtype: type[np.generic]) -> np.ndarray:
    """Returns an array of zeros, of which what was never written takes no memory."""
    size = count * np.dtype(dtype).itemsize
    if size < _LEAST_BYTES:
        return np.zeros(count, dtype)
    pages = mmap.mmap(-1, size)
    if size >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype, count)

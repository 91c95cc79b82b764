"""Aligned buffers, a pool that reuses them, and malloc settings that keep freed memory.

A host device shares an array instead of copying it if the array is aligned to 64 bytes.

Touching new memory costs more than copying into it, because the kernel clears each page. A step
receives arrays of the same shapes as the previous step, whose arrays are free by then. By default
glibc returns such memory to the system, and every page is cleared again: a quarter of a step's
time, measured.
"""

import ctypes
import math
import sys
from typing import Any

import numpy as np

ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Returns an uninitialized array with aligned memory."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """Returns a copy with aligned memory."""
    copy = aligned_empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def is_aligned(array: np.ndarray) -> bool:
    """Whether an array can be shared without a copy: aligned and in C order."""
    return array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0


_MOST_OF_A_SHAPE = 64


class BufferPool:
    """Hands out buffers; one is reused once neither it nor an array sharing its memory is alive."""

    def __init__(self) -> None:
        self._held: dict[tuple[tuple[int, ...], np.dtype[Any]], list[np.ndarray]] = {}
        free = [aligned_empty((1,), np.dtype(np.uint8))]  # in a list, like the others
        self._free_counts = self._counts(free[0])

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Returns an aligned, uninitialized array that has no other owner."""
        held = self._held.setdefault((shape, dtype), [])
        for place in range(len(held)):
            if self._counts(held[place]) == self._free_counts:
                return held[place]
        made = aligned_empty(shape, dtype)
        if len(held) < _MOST_OF_A_SHAPE:
            held.append(made)
        return made

    @staticmethod
    def _counts(array: np.ndarray) -> tuple[int, int]:
        """Returns the reference counts of an array and of the memory that it views.

        A device array sharing the memory holds the first, a view holds the second.
        """
        return sys.getrefcount(array), sys.getrefcount(array.base)


# Parameter numbers of glibc's `mallopt`, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_KEPT_BYTES = 1 << 30
_PAD_BYTES = 1 << 26
_LARGEST_MMAP_THRESHOLD = 1 << 25  # glibc's maximum


def keep_freed_memory() -> bool:
    """Configures malloc to keep freed memory; returns whether the C library accepts this."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_TRIM_THRESHOLD, _KEPT_BYTES),
        (_TOP_PAD, _PAD_BYTES),
        (_ARENA_MAX, 1),  # glibc trims the other arenas regardless of these settings
    )
    done = [mallopt(number, value) for number, value in settings]
    return done == [1] * len(settings)

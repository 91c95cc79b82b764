"""Aligned buffers that are used again once nothing holds what was in them.

Memory that is new to a process costs more than copying into it: the system has to clear it, page
by page. A step receives arrays of the same shapes as the one before, whose arrays are gone then.
"""

import sys
from typing import Any

import numpy as np

from jaxfleet.ps.aligned import aligned_empty

_MOST_OF_A_SHAPE = 64


class Buffers:
    """Hands out buffers; who holds one, or an array that shares its memory, keeps it."""

    def __init__(self) -> None:
        self._held: dict[tuple[tuple[int, ...], np.dtype[Any]], list[np.ndarray]] = {}
        free = [aligned_empty((1,), np.dtype(np.uint8))]  # held by a list, as the others are
        self._free_counts = self._counts(free[0])

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Returns an aligned array of any content that nothing else holds."""
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
        """Returns how many hold an array, and the memory that it is a view of.

        A device's array that shares the memory holds the one, a view of it the other.
        """
        return sys.getrefcount(array), sys.getrefcount(array.base)

"""Finds what repeats in a list: layers that are written out one after another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Repeats:
    """A stretch of a list that repeats.

    Attributes:
        start: its first place.
        period: after so many places it repeats.
        length: of the whole.
    """

    start: int
    period: int
    length: int


def longest_repeats(items: Sequence[Any], *, least: int) -> Repeats | None:
    """Returns the longest stretch that repeats, of those the one of the shortest period.

    Args:
        items: a list.
        least: how often it must be there.
    """
    numbers: dict[Any, int] = {}
    row = np.array([numbers.setdefault(item, len(numbers)) for item in items], dtype=np.int64)
    best: Repeats | None = None
    for period in range(1, len(row) // least + 1):
        start, count = _longest(row[period:] == row[:-period])
        length = count + period
        if length >= least * period and (best is None or length > best.length):
            best = Repeats(start, period, length)
    return best


def _longest(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Returns where the longest stretch of true begins, and how long it is."""
    ends = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    if not len(ends):
        return 0, 0
    starts, stops = ends[::2], ends[1::2]
    at = int(np.argmax(stops - starts))
    return int(starts[at]), int(stops[at] - starts[at])

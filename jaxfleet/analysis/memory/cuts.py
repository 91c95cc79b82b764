"""Where the forward part of a step may be cut."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_STAGES = 128  # what planning takes grows with the square of it

Bytes = NDArray[np.int64]


def cut_positions(crossing: Bytes, *, most: int = MOST_STAGES) -> list[int]:
    """Returns the positions of the first operators of stages, 0 among them.

    Every position is taken where there are few. Else a step is cut where fewer bytes cross than
    around it: layers that repeat have the same bytes, and so are cut at the same place. Where
    these are still too many, they are thinned by the same rule, and in the end by taking every
    second, third or n-th.

    Args:
        crossing: by position, the bytes that are made before it and read from it on.
        most: how many there may be.
    """
    found: Sequence[int] = range(1, len(crossing))
    if len(found) >= most:
        found = _one_of_each_run(crossing, _minima(crossing, found))
    while len(found) >= most:
        before, found = len(found), _minima(crossing, found)
        if len(found) == before:
            found = found[:: -(-before // (most - 1))]
    return [0, *found]


def _minima(crossing: Bytes, among: Sequence[int]) -> list[int]:
    """Returns those where no more bytes cross than at their neighbours."""
    found = []
    for place, position in enumerate(among):
        before = crossing[among[place - 1]] if place else np.inf
        after = crossing[among[place + 1]] if place + 1 < len(among) else np.inf
        if crossing[position] <= min(before, after):
            found.append(position)
    return found


def _one_of_each_run(crossing: Bytes, positions: Sequence[int]) -> list[int]:
    """Returns the last of those that lie as good as side by side, and have equal bytes."""
    found: list[int] = []
    for position in positions:
        is_near = found and position - found[-1] <= 2  # one operator between may add a little
        if is_near and crossing[position] == crossing[found[-1]]:
            found.pop()
        found.append(position)
    return found

"""Sums the pushes of several trainers, row by row."""

from collections.abc import Sequence

import numpy as np

from jaxfleet.tables.buckets import mixed
from jaxfleet.tables.compiled import compiled


def merge(pushes: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns each key once, in the order in which they first come, with the sum of its gradients.

    The summands of a key are added in the order of the pushes, one after the other, whatever
    other keys there are: so it makes no difference to any bit how servers divide the keys.

    Args:
        pushes: pairs of int64[n] and float32[n, dim], one or more.

    Returns:
        int64[u] and float32[u, dim].
    """
    most = sum(len(keys) for keys, _ in pushes)
    keys = np.empty(most, np.int64)
    sums = np.empty((most, pushes[0][1].shape[1]), np.float32)
    places = np.full(2 << max(1, most).bit_length(), -1, np.int32)  # at most half full
    count = 0
    for some, grads in pushes:
        some_keys = np.require(some, np.int64, ["C", "A"])
        summands = np.require(grads, np.float32, ["C", "A"])
        count = _merge(some_keys, summands, places, keys, sums, count)
    return keys[:count], sums[:count]


@compiled("i64[]", "f32[,]", "i32[]!", "i64[]!", "f32[,]!", "i64")
def _merge(
    some: np.ndarray,
    grads: np.ndarray,
    places: np.ndarray,
    keys: np.ndarray,
    sums: np.ndarray,
    count: int,
) -> int:
    """Adds a push to what there is; returns how many keys there are then."""
    mask = np.uint64(len(places) - 1)
    for i in range(len(some)):
        at = mixed(np.uint64(some[i])) & mask
        while places[at] >= 0 and keys[places[at]] != some[i]:
            at = (at + np.uint64(1)) & mask
        place = places[at]
        if place >= 0:
            for j in range(grads.shape[1]):
                sums[place, j] += grads[i, j]
            continue
        places[at] = count
        keys[count] = some[i]
        for j in range(grads.shape[1]):
            sums[count, j] = grads[i, j]
        count += 1
    return count

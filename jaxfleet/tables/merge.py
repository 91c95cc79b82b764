"""Sums the pushes of several trainers, row by row."""

from collections.abc import Sequence

import numpy as np


def merge(pushes: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns each key once, in increasing order, with the sum of its gradients.

    The summands of a key are added in the order of the pushes, one after the other, whatever
    other keys there are: so it makes no difference to any bit how servers divide the keys.

    Args:
        pushes: pairs of int64[n] and float32[n, dim], one or more.

    Returns:
        int64[u] and float32[u, dim].
    """
    keys = np.concatenate([keys for keys, _ in pushes])
    grads = np.concatenate([grads for _, grads in pushes])
    unique, places = np.unique(keys, return_inverse=True)
    sums = np.zeros((len(unique), grads.shape[1]), np.float32)
    np.add.at(sums, places, grads)
    return unique, sums

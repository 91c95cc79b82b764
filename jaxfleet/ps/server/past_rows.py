"""The rows of a table before its last update, for trainers that look them up again.

A trainer that returns, and all trainers once the members of the job have changed, compute a step
again that a server may have applied to its tables: they need the rows with which it was begun.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class PastRows:
    """The rows that an update replaced.

    Attributes:
        step: of the update.
        keys: int64[n], distinct, those that it changed.
        rows: float32[n, dim], their rows before.
    """

    step: int
    keys: np.ndarray
    rows: np.ndarray

    def before(self, keys: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Returns the rows of keys before the update.

        Args:
            keys: int64[m].
            now: float32[m, dim], their rows after it.
        """
        if not len(self.keys):
            return now
        order = np.argsort(self.keys)
        after = np.searchsorted(self.keys, keys, sorter=order)
        places = order[np.minimum(after, len(order) - 1)]
        changed = np.flatnonzero(self.keys[places] == keys)
        found = now.copy()
        found[changed] = self.rows[places[changed]]
        return found

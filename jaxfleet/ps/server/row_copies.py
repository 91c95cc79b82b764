"""Rows of tables as trainers received them, by which late gradients are corrected: DC-ASGD.

It is `g + c * g * g * (w - w')` for rows, where `w'` is the row that the trainer computed with; for
parameters the server's program says it. A step pushes the keys that it looked up, so the last
look-up of each trainer is all that is kept of a table: for each trainer, the rows of a batch.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False)
class Received:
    """What a trainer received of the rows that it pushes gradients of.

    Attributes:
        places: int64[m], where they stand among those that it pushes; the rest it never received.
        rows: float32[m, dim].
    """

    places: np.ndarray
    rows: np.ndarray


@dataclass
class RowCopies:
    """What each trainer received last of each table.

    Attributes:
        are_kept: whether gradients are corrected; else nothing is kept.
    """

    are_kept: bool
    _given: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def give(self, table: str, trainer: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """Notes what a trainer receives of keys; the rows may not change afterwards."""
        if self.are_kept:
            self._given[table, trainer] = (keys.copy(), rows)  # a message's memory is used again

    def of(self, table: str, trainer: int, keys: np.ndarray) -> Received | None:
        """Returns what a trainer received of keys, each once; None where that was none."""
        known = self._given.get((table, trainer))
        if known is None or not len(known[0]):
            return None
        given, rows = known
        if np.array_equal(given, keys):
            return Received(np.arange(len(keys)), rows)
        order = np.argsort(given)
        after = np.searchsorted(given, keys, sorter=order)
        found = order[np.minimum(after, len(given) - 1)]
        places = np.flatnonzero(given[found] == keys)
        return Received(places, rows[found[places]])

    def restart(self) -> None:
        """Forgets all: tables hold something else now."""
        self._given.clear()


def compensated(
    grads: np.ndarray, now: np.ndarray, received: Received, factor: float
) -> np.ndarray:
    """Returns the gradients of rows, corrected by how far these have moved meanwhile.

    Args:
        grads: float32[n, dim].
        now: float32[n, dim], what the rows are.
        received: what they were for the trainer.
        factor: how much a gradient is corrected.
    """
    made, at = grads.copy(), received.places
    late = made[at]
    made[at] += (now[at] - received.rows) * late * late * np.float32(factor)
    return made

"""Tables of a trainer that merges gradients: rows are averaged as parameters are, and go with them.

The mean is over all that is merged: a step without a key counts as one whose gradient is 0, as it
does where the whole of a parameter is averaged.
"""

from collections.abc import Mapping

import numpy as np

from jaxfleet.ps.tables import RemoteTables
from jaxfleet.tables.merge import merge
from jaxfleet.tables.scores import WaitingScores


class MeanTables:
    """Is `TableAccess` for a trainer that sends the mean of several gradients.

    Args:
        remote: the servers' tables.
    """

    def __init__(self, remote: RemoteTables) -> None:
        self._remote = remote
        self._waiting: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}  # by table
        self._scores: dict[str, WaitingScores] = {}

    def look_up(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns rows as servers have them, as `TableAccess.look_up` says."""
        return self._remote.look_up(table, keys)

    def look_up_all(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns rows of several tables, asked for at once."""
        return self._remote.look_up_all(keys)

    def push(
        self,
        table: str,
        keys: np.ndarray,
        grads: np.ndarray,
        *,
        shows: np.ndarray | None = None,
        clicks: np.ndarray | None = None,
    ) -> None:
        """Takes the gradients of a step; `send` sends them, and scores, which are added up."""
        self._waiting.setdefault(table, []).append((keys, grads))
        self._scores.setdefault(table, WaitingScores()).add(keys, shows, clicks)

    def send(self, steps: int) -> None:
        """Sends what waits, of so many steps."""
        for table, pushes in self._waiting.items():
            keys, grads = pushes[0] if steps == 1 else merge(pushes)
            mean = grads if steps == 1 else grads / np.float32(steps)
            scores = self._scores[table]
            given = (
                dict(zip(("shows", "clicks"), scores.take(keys).T, strict=True)) if scores else {}
            )
            self._remote.push(table, keys, mean, **given)
        self._waiting.clear()

    def restart(self) -> None:
        """Forgets what waits: servers go on from something else."""
        self._waiting.clear()
        self._scores.clear()

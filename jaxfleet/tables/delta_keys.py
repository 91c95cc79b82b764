"""Keys removed, or spilled to disk, since the last save: input of the next delta."""

import numpy as np


class Tombstones:
    """Records removed keys, once there is a save to compute a delta against."""

    def __init__(self) -> None:
        self._wanted = False
        self._keys: list[np.ndarray] = []
        self._steps: list[int] = []

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes for keys in self._keys)

    def begin(self) -> None:
        """Starts recording: from now on a delta may be requested."""
        self._wanted = True

    def add(self, keys: np.ndarray, step: int) -> None:
        """Records that keys were removed at a step."""
        if self._wanted and len(keys):
            self._keys.append(keys)
            self._steps.append(step)

    def since(self, step: int) -> np.ndarray:
        """Returns int64[m], the unique keys removed after this step, sorted."""
        found = [keys for keys, at in zip(self._keys, self._steps, strict=True) if at > step]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def forget(self, until: int) -> None:
        """Drops records of this step and before."""
        kept = [at > until for at in self._steps]
        self._keys = [keys for keys, keep in zip(self._keys, kept, strict=True) if keep]
        self._steps = [at for at, keep in zip(self._steps, kept, strict=True) if keep]


class SpilledKeys:
    """Records the keys of rows that were spilled to disk after they were touched.

    Once recording, it has the key of every row on disk that was touched after the step `_from`.
    """

    def __init__(self) -> None:
        self._wanted = False
        self._latest = -1  # step of the latest event
        self._from = -1
        self._keys: list[np.ndarray] = []
        self._touched: list[np.ndarray] = []

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self._keys, *self._touched))

    def saw(self, step: int) -> None:
        """Records that some row was touched at a step."""
        self._latest = max(self._latest, step)

    def begin(self) -> None:
        """Starts recording; rows already on disk were touched before."""
        if not self._wanted:
            self._wanted = True
            self.forget(self._latest)

    def put(self, step: int) -> None:
        """Notes that rows touched up to a step came from a save, and so are not changes."""
        self.saw(step)
        self.begin()
        self.forget(step)

    def add(self, keys: np.ndarray, touched: np.ndarray) -> None:
        """Records the spilled rows that were touched after `_from`."""
        late = touched > self._from
        if self._wanted and late.any():
            self._keys.append(keys[late])
            self._touched.append(touched[late])

    def since(self, step: int) -> np.ndarray | None:
        """Returns int64[m], with all rows on disk touched after a step; None if unknown."""
        if not self._wanted or step < self._from:
            return None
        found = [
            keys[touched > step] for keys, touched in zip(self._keys, self._touched, strict=True)
        ]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def forget(self, until: int) -> None:
        """Drops records of this step and before."""
        self._from = max(self._from, until)
        kept = [touched > self._from for touched in self._touched]
        self._keys = [keys[some] for keys, some in zip(self._keys, kept, strict=True) if some.any()]
        self._touched = [t[some] for t, some in zip(self._touched, kept, strict=True) if some.any()]

"""Which rows went to disk since a save, so that one of changes need not read the whole disk."""

import numpy as np


class Late:
    """Remembers the keys of rows that were put on disk after they were touched.

    From the time on that somebody may ask for changes, it knows of every row on disk that was
    touched after the step `_from`.
    """

    def __init__(self) -> None:
        self._wanted = False
        self._latest = -1  # step of anything that happened
        self._from = -1
        self._keys: list[np.ndarray] = []
        self._touched: list[np.ndarray] = []

    @property
    def nbytes(self) -> int:
        """How much memory it holds."""
        return sum(array.nbytes for array in (*self._keys, *self._touched))

    def saw(self, step: int) -> None:
        """Says that something was touched at a step."""
        self._latest = max(self._latest, step)

    def begin(self) -> None:
        """Remembers from now on; rows that are on disk already were touched by now."""
        if not self._wanted:
            self._wanted = True
            self.forget(self._latest)

    def put(self, step: int) -> None:
        """Says that rows touched up to a step were put in, which are of a save and no changes."""
        self.saw(step)
        self.begin()
        self.forget(step)

    def add(self, keys: np.ndarray, touched: np.ndarray) -> None:
        """Remembers those of these rows that were touched late."""
        late = touched > self._from
        if self._wanted and late.any():
            self._keys.append(keys[late])
            self._touched.append(touched[late])

    def since(self, step: int) -> np.ndarray | None:
        """Returns int64[m], keys that have all rows on disk touched after a step; None: unknown."""
        if not self._wanted or step < self._from:
            return None
        found = [
            keys[touched > step] for keys, touched in zip(self._keys, self._touched, strict=True)
        ]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def forget(self, until: int) -> None:
        """Forgets what was touched at this step or before."""
        self._from = max(self._from, until)
        kept = [touched > self._from for touched in self._touched]
        self._keys = [keys[some] for keys, some in zip(self._keys, kept, strict=True) if some.any()]
        self._touched = [t[some] for t, some in zip(self._touched, kept, strict=True) if some.any()]

"""Which keys left, and when: what a delta must say besides what is there."""

import numpy as np


class Gone:
    """Remembers keys that left, from the time on that somebody may ask for changes."""

    def __init__(self) -> None:
        self._wanted = False
        self._keys: list[np.ndarray] = []
        self._steps: list[int] = []

    @property
    def nbytes(self) -> int:
        """How much memory it holds."""
        return sum(keys.nbytes for keys in self._keys)

    def begin(self) -> None:
        """Remembers from now on: there is a save that changes may be asked for since."""
        self._wanted = True

    def add(self, keys: np.ndarray, step: int) -> None:
        """Remembers that these left at this step."""
        if self._wanted and len(keys):
            self._keys.append(keys)
            self._steps.append(step)

    def since(self, step: int) -> np.ndarray:
        """Returns int64[m], those that left after this step, each once, in their order."""
        found = [keys for keys, at in zip(self._keys, self._steps, strict=True) if at > step]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def forget(self, until: int) -> None:
        """Forgets those that left at this step or before."""
        kept = [at > until for at in self._steps]
        self._keys = [keys for keys, keep in zip(self._keys, kept, strict=True) if keep]
        self._steps = [at for at, keep in zip(self._steps, kept, strict=True) if keep]

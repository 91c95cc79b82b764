"""Shows and clicks of keys that wait for a later push, where not every step sends one."""

from dataclasses import dataclass, field

import numpy as np

from jaxfleet.tables.merge import merge


@dataclass
class WaitingScores:
    """What was counted since scores were taken last; nothing where no step gave any."""

    _counted: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._counted)

    def add(self, keys: np.ndarray, shows: np.ndarray | None, clicks: np.ndarray | None) -> None:
        """Takes those of a step, if it gives any.

        Args:
            keys: int64[n], each once.
            shows: float32[n].
            clicks: float32[n].
        """
        if shows is not None or clicks is not None:
            none = np.zeros(len(keys), np.float32)
            given = [none if counts is None else counts for counts in (shows, clicks)]
            self._counted.append((keys, np.stack(given, axis=1)))

    def take(self, keys: np.ndarray) -> np.ndarray:
        """Returns float32[n, 2], the shows and clicks of keys, and forgets them.

        Args:
            keys: int64[n], each once; all that were counted are among them.
        """
        found = np.zeros((len(keys), 2), np.float32)
        if self._counted:
            scored, sums = merge(self._counted)
            order = np.argsort(keys)
            found[order[np.searchsorted(keys, scored, sorter=order)]] = sums
        self._counted.clear()
        return found

"""Which keys each bucket has, where a bucket may have no more than its part of a bound.

A bound on a whole table is kept bucket by bucket: what goes of a bucket depends on that bucket
alone, and so not on which other buckets its server has. It costs 8 bytes a key, or up to 16 where
buckets differ much, and nothing where a table has no bound.
"""

from collections.abc import Callable

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.buckets import BUCKETS, bucket_of

_LEAST_WIDTH = 8


class Members:
    """The keys of each bucket.

    Args:
        most: of all buckets together.
        what: that are bounded, for an error.
        is_there: returns bool[n], which of some keys are still there.

    Raises:
        ProgramError: some buckets would have none.
    """

    def __init__(self, most: int, what: str, is_there: Callable[[np.ndarray], np.ndarray]) -> None:
        if most < BUCKETS:
            hint = "what may be kept is divided among the buckets, whatever servers there are"
            raise ProgramError(f"at most {most} {what}, of {BUCKETS} buckets", hint=hint)
        self._most = np.diff(np.arange(BUCKETS + 1, dtype=np.int64) * most // BUCKETS)
        self._is_there = is_there
        self.clear()

    @property
    def nbytes(self) -> int:
        """How much memory it holds."""
        return self._keys.nbytes

    def clear(self) -> None:
        """Forgets all."""
        self._keys = np.empty((BUCKETS, _LEAST_WIDTH), np.int64)
        self._filled = np.zeros(BUCKETS, np.int64)  # some of those left, maybe to come again
        self._there = np.zeros(BUCKETS, np.int64)

    def add(self, keys: np.ndarray) -> None:
        """Takes keys in that were not there.

        Args:
            keys: int64[n], each once.
        """
        if not len(keys):
            return
        buckets = bucket_of(keys)
        order = np.argsort(buckets, kind="stable")
        counts = np.bincount(buckets, minlength=BUCKETS)
        self._make_room(counts)
        firsts = np.cumsum(counts) - counts
        sorted_buckets = buckets[order]
        places = self._filled[sorted_buckets] + np.arange(len(keys)) - firsts[sorted_buckets]
        self._keys[sorted_buckets, places] = keys[order]
        self._filled += counts
        self._there += counts

    def remove(self, keys: np.ndarray) -> None:
        """Notes that keys left.

        Args:
            keys: int64[n], each once; all were there.
        """
        if len(keys):
            self._there -= np.bincount(bucket_of(keys), minlength=BUCKETS)

    def too_many(self) -> list[tuple[int, int]]:
        """Returns the buckets that have too many keys, with how many too many."""
        surplus = self._there - self._most
        full = np.flatnonzero(surplus > 0)
        return list(zip(full.tolist(), surplus[full].tolist(), strict=True))

    def of(self, bucket: int) -> np.ndarray:
        """Returns int64[n], the keys that a bucket has, each once."""
        known = self._keys[bucket, : self._filled[bucket]]
        if len(known) == self._there[bucket]:  # none of them left
            return known.copy()
        known = np.unique(known)
        found: np.ndarray = known[self._is_there(known)]
        return found

    def keep(self, bucket: int, keys: np.ndarray) -> None:
        """Notes that of a bucket's keys these are all that may be there."""
        self._keys[bucket, : len(keys)] = keys
        self._filled[bucket] = len(keys)

    def _make_room(self, more: np.ndarray) -> None:
        width = self._keys.shape[1]
        full = np.flatnonzero(self._filled + more > width)
        mostly_gone = full[self._filled[full] > 2 * self._there[full]]
        for bucket in mostly_gone.tolist():
            self.keep(bucket, self.of(bucket))
        wanted = int((self._filled + more).max())
        if wanted > width:
            kept = self._keys
            self._keys = np.empty((BUCKETS, max(wanted, width + width // 2)), np.int64)
            self._keys[:, :width] = kept

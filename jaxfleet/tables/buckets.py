"""Mapping of keys to buckets and of buckets to servers, and bounds on the keys of a bucket.

A key's bucket never changes, so a table moves to another number of servers bucket by bucket.
"""

from collections.abc import Callable

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.numba_jit import inlined

BUCKETS = 1024
_LEAST_WIDTH = 8  # keys of a bucket
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(keys: np.ndarray) -> np.ndarray:
    """Hashes int64[n] to uint64[n]; each bit depends on every bit of the key.

    The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, 2014).
    """
    mixed = keys.astype(np.int64, copy=False).view(np.uint64) + GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@inlined
def mixed(number: np.uint64) -> np.uint64:
    """`mix` of one number, for compiled functions."""
    number += GOLDEN
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))


def bucket_of(keys: np.ndarray) -> np.ndarray:
    """Returns int32[n], the bucket of each key: the upper ten bits of its mix.

    The lower bits place a key in its server's index, so the two are independent.
    """
    return (mix(keys) >> np.uint64(54)).astype(np.int32)


def server_of(keys: np.ndarray, servers: int) -> np.ndarray:
    """Returns int32[n], the server of each key, of 1 to `BUCKETS` servers."""
    return bucket_of(keys) * np.int32(servers) // np.int32(BUCKETS)


def buckets_of(server: int, servers: int) -> range:
    """Returns the buckets of one of `servers` servers."""
    return range(-(-server * BUCKETS // servers), -(-(server + 1) * BUCKETS // servers))


class BucketCapacity:
    """The keys of each bucket, for tables that bound each bucket to its share of a total.

    So evictions from a bucket depend on that bucket alone, and not on the other buckets of its
    server. It costs 8 bytes a key, or up to 16 if buckets differ much. `is_there` returns bool[n],
    the keys that still exist.

    Raises:
        ProgramError: the share of some buckets would be 0.
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
        return self._keys.nbytes

    def clear(self) -> None:
        self._keys = np.empty((BUCKETS, _LEAST_WIDTH), np.int64)
        self._filled = np.zeros(BUCKETS, np.int64)  # includes keys that left, some twice
        self._there = np.zeros(BUCKETS, np.int64)

    def add(self, keys: np.ndarray) -> None:
        """Adds unique keys, int64[n], that were absent."""
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
        """Counts out unique keys, int64[n], that were present."""
        if len(keys):
            self._there -= np.bincount(bucket_of(keys), minlength=BUCKETS)

    def too_many(self) -> list[tuple[int, int]]:
        """Returns the overfull buckets, each with its surplus."""
        surplus = self._there - self._most
        full = np.flatnonzero(surplus > 0)
        return list(zip(full.tolist(), surplus[full].tolist(), strict=True))

    def of(self, bucket: int) -> np.ndarray:
        """Returns int64[n], the unique keys of a bucket."""
        known = self._keys[bucket, : self._filled[bucket]]
        if len(known) == self._there[bucket]:  # none has left
            return known.copy()
        known = np.unique(known)
        found: np.ndarray = known[self._is_there(known)]
        return found

    def keep(self, bucket: int, keys: np.ndarray) -> None:
        """Replaces the list of keys that may be in a bucket."""
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

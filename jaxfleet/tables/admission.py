"""Admission of keys: by number of pushes or by chance.

A key waiting for a row is a candidate. Its push count is kept and saved with the rows, and is
dropped when the key gets its row. Chance is a function of the key, the count and the seed, so any
number of servers admits the same keys at the same pushes.
"""

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.buckets import BucketCapacity, mix
from jaxfleet.tables.columns import Columns, Kind
from jaxfleet.tables.eviction import first_to_go
from jaxfleet.tables.hash_index import Index
from jaxfleet.tables.hash_kernels import NOWHERE
from jaxfleet.tables.row_batch import order_of
from jaxfleet.tables.spec import AfterCount, ByChance
from jaxfleet.tables.validation import Part

_COUNT, _COUNTED = "count", "counted"
_SPARED = 8  # an overfull bucket drops 1/8 more than its surplus, so that this is rare

NO_CANDIDATES = (np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64))


class Candidates:
    """The keys waiting for a row.

    Raises:
        ProgramError: `admission` is neither `AfterCount` nor `ByChance`, or its bound is too small.
    """

    def __init__(self, admission: Part, table: str) -> None:
        if not isinstance(admission, AfterCount | ByChance):
            raise ProgramError(f"keys cannot be let in by {admission!r}")
        self._admission = admission
        what = f"candidates of table '{table}'"
        self._members = BucketCapacity(admission.candidates, what, self._are_there)
        self.clear()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        columns = self._index.slots * self._columns.slot_bytes
        return self._index.nbytes + columns + self._members.nbytes

    def clear(self) -> None:
        self._index = Index()
        self._members.clear()
        self._columns = Columns({_COUNT: Kind(np.int32), _COUNTED: Kind(np.int32)})

    def admit(self, keys: np.ndarray, step: int) -> np.ndarray:
        """Counts a push of unique keys without rows, int64[n]; returns bool[n], which get one."""
        with self._index.adding(keys) as (slots, made):
            self._columns.reserve(self._index.slots)
            self._columns[_COUNT].fill(slots[made], 0)
        self._members.add(keys[made])
        counts = self._columns[_COUNT].take(slots) + np.int32(1)
        self._columns[_COUNT].put(slots, counts)
        self._columns[_COUNTED].fill(slots, step)
        admitted = self._let_in(keys, counts)
        self.remove(keys[admitted])
        return admitted

    def forget_surplus(self) -> np.ndarray:
        """Drops the least recently pushed keys of overfull buckets; returns them, int64[m]."""
        found = [self._forget(bucket, surplus) for bucket, surplus in self._members.too_many()]
        return np.concatenate([np.empty(0, np.int64), *found])

    def _forget(self, bucket: int, surplus: int) -> np.ndarray:
        keys = self._members.of(bucket)
        slots = self._index.find(keys)
        by = (self._columns[name].take(slots) for name in (_COUNTED, _COUNT))
        gone = first_to_go(surplus + (len(keys) - surplus) // _SPARED, keys, *by)
        self._members.keep(bucket, np.delete(keys, gone))
        self.remove(keys[gone])
        return keys[gone]

    def items(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns int64[n], int32[n], int32[n]: keys, counts and steps of the last pushes."""
        keys, slots = self._index.items()
        return keys, self._columns[_COUNT].take(slots), self._columns[_COUNTED].take(slots)

    def since(self, step: int | None) -> tuple[np.ndarray, ...]:
        """Returns `items` of those pushed after a step, if given, by bucket and key."""
        keys, counts, counted = self.items()
        late = np.arange(len(keys)) if step is None else np.flatnonzero(counted > step)
        late = late[order_of(keys[late])]
        return keys[late], counts[late], counted[late].astype(np.int64)

    def put(self, keys: np.ndarray, counts: np.ndarray, counted: np.ndarray) -> None:
        with self._index.adding(keys) as (slots, made):
            self._columns.reserve(self._index.slots)
            self._columns[_COUNT].put(slots, counts)
            self._columns[_COUNTED].put(slots, counted)
        self._members.add(keys[made])

    def remove(self, keys: np.ndarray) -> None:
        self._members.remove(keys[self._are_there(keys)])
        self._index.remove(keys)

    def _are_there(self, keys: np.ndarray) -> np.ndarray:
        there: np.ndarray = self._index.find(keys) != NOWHERE
        return there

    def _let_in(self, keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
        if isinstance(self._admission, AfterCount):
            return counts >= self._admission.count
        seed = mix(np.array([self._admission.seed]))
        begin = mix((keys.view(np.uint64) ^ seed).view(np.int64))
        drawn = mix((begin + counts.astype(np.uint64)).view(np.int64))
        return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self._admission.probability

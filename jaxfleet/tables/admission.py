"""Which keys get rows: those that were pushed often enough, or that chance lets in.

A key that waits is a candidate: how often it was pushed is kept, is saved with the rows, and goes
when the key gets its row. Chance is a function of the key, the count and the seed, so that any
number of servers lets in the same keys at the same pushes.
"""

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.buckets import mix
from jaxfleet.tables.eviction import first_to_go
from jaxfleet.tables.index import Index
from jaxfleet.tables.members import Members
from jaxfleet.tables.probing import NOWHERE
from jaxfleet.tables.rows import Columns, Kind
from jaxfleet.tables.spec import AfterCount, ByChance, Part

_COUNT, _COUNTED = "count", "counted"
_SPARED = 8  # where a bucket has too many, one of so many goes besides: not each time anew


class Candidates:
    """The keys that wait.

    Args:
        admission: `AfterCount` or `ByChance`.
        table: whose keys they are, for an error.

    Raises:
        ProgramError: it is neither, or bounds them by too few.
    """

    def __init__(self, admission: Part, table: str) -> None:
        if not isinstance(admission, AfterCount | ByChance):
            raise ProgramError(f"keys cannot be let in by {admission!r}")
        self._admission = admission
        what = f"candidates of table '{table}'"
        self._members = Members(admission.candidates, what, self._are_there)
        self.clear()

    def __len__(self) -> int:
        """Returns how many wait."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """How much memory they hold."""
        columns = self._index.slots * self._columns.slot_bytes
        return self._index.nbytes + columns + self._members.nbytes

    def clear(self) -> None:
        """Forgets all."""
        self._index = Index()
        self._members.clear()
        self._columns = Columns({_COUNT: Kind(np.int32), _COUNTED: Kind(np.int32)})

    def admit(self, keys: np.ndarray, step: int) -> np.ndarray:
        """Counts a push of keys without rows; returns bool[n], which of them get one now.

        Args:
            keys: int64[n], each once.
            step: the step that pushes.
        """
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
        """Takes the longest not pushed out of buckets that have too many; returns int64[m]."""
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
        """Returns int64[n], int32[n], int32[n]: keys, counts, the steps of their last pushes."""
        keys, slots = self._index.items()
        return keys, self._columns[_COUNT].take(slots), self._columns[_COUNTED].take(slots)

    def put(self, keys: np.ndarray, counts: np.ndarray, counted: np.ndarray) -> None:
        """Has these wait, with these counts."""
        with self._index.adding(keys) as (slots, made):
            self._columns.reserve(self._index.slots)
            self._columns[_COUNT].put(slots, counts)
            self._columns[_COUNTED].put(slots, counted)
        self._members.add(keys[made])

    def remove(self, keys: np.ndarray) -> None:
        """Forgets these, each once, as far as they wait."""
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

"""Index of keys to slots: open addressing, in a table that grows incrementally.

A table that is too full moves into a larger one from its beginning to its end, a piece with every
addition. Which table holds a key depends on which side of the line between moved and unmoved its
home is, so no caller waits for more than one piece. Loops over keys are in `hash_kernels`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables import hash_kernels
from jaxfleet.tables.columns import zeros
from jaxfleet.tables.hash_kernels import EMPTY, FREE, NEXT_SLOT, NOWHERE, ZERO_SLOT

_LEAST_HOMES = 1024
_MOST_LOAD = 0.8  # of the homes: a successful probe then reads 3 places on average, an insertion 13
_GROWTH = 1.5  # ratio of homes; 2 would leave more of the new table empty
_PLACES_MOVED = 16  # per added key, so that the old table is empty before the new one is full
_ADDED_AT_ONCE = 4096  # keys, between two pieces of a move
_TAIL = 512  # places after the last home; a longer cluster makes the table grow


class Index:
    """Maps each key to a slot, from 0 on; slots of removed keys are reused."""

    def __init__(self) -> None:
        self._table = _Table(_LEAST_HOMES)
        self._old: _Table | None = None
        self._moved = 0  # places of the old table before this one are empty
        self._numbers = hash_kernels.no_keys()
        self._free = np.empty(0, np.int32)
        self.longest_pause_s = 0.0

    def __len__(self) -> int:
        return int(self._numbers[NEXT_SLOT] - self._numbers[FREE])

    @property
    def slots(self) -> int:
        return int(self._numbers[NEXT_SLOT])

    @property
    def growing(self) -> bool:
        return self._old is not None

    @property
    def nbytes(self) -> int:
        old = 0 if self._old is None else self._old.nbytes
        return self._table.nbytes + old + self._free.nbytes

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns int32[n], the slot of each key of int64[n], or `NOWHERE`."""
        slots = np.empty(len(keys), np.int32)
        zero = int(self._numbers[ZERO_SLOT])
        if self._old is None:
            hash_kernels.find(
                self._table.keys, self._table.slots, self._table.homes, zero, keys, slots
            )
        else:
            hash_kernels.find_in_two(*self._tables(), zero, keys, slots)
        return slots

    def add(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Assigns slots to those of int64[n] keys that have none, and once to equal ones.

        Returns int32[n], the slot of each key, and int64[m], the positions in `keys` of new ones.
        """
        slots = self.find(keys)
        absent = np.flatnonzero(slots == NOWHERE)
        if not len(absent):
            return slots, absent
        made = np.zeros(len(absent), np.int64)
        count = 0
        try:
            for begin in range(0, len(absent), _ADDED_AT_ONCE):
                piece = absent[begin : begin + _ADDED_AT_ONCE]
                self._make_room(len(piece))
                count = self._add(keys, piece, slots, made, count)
        except BaseException:
            self.remove(keys[absent])
            raise
        return slots, made[:count]

    @contextmanager
    def adding(self, keys: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the result of `add`, and removes the new keys if the body raises.

        So no key keeps a slot without values, even after an interrupt.
        """
        slots, made = self.add(keys)
        try:
            yield slots, made
        except BaseException:
            self.remove(keys[made])
            raise

    def remove(self, keys: np.ndarray) -> np.ndarray:
        """Removes keys, int64[n]; returns int32[m], the slots of those that were present."""
        slots = np.empty(len(keys), np.int32)
        if not len(keys):
            return slots
        count = hash_kernels.remove(*self._tables(), self._numbers, keys, slots)
        freed = slots[:count]
        kept = int(self._numbers[FREE])
        if kept + count > len(self._free):
            more = np.empty(2 * (kept + count), np.int32)
            more[:kept] = self._free[:kept]
            self._free = more
        self._free[kept : kept + count] = freed
        self._numbers[FREE] += count
        self._table.used -= count
        return freed

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns int64[n] and int32[n], all keys and their slots, in no order."""
        self._move(None)
        places = np.flatnonzero(self._table.keys != EMPTY)
        keys, slots = [self._table.keys[places]], [self._table.slots[places]]
        if (zero := int(self._numbers[ZERO_SLOT])) != NOWHERE:
            keys.append(np.zeros(1, np.int64))
            slots.append(np.array([zero], np.int32))
        return np.concatenate(keys), np.concatenate(slots)

    def _add(
        self, keys: np.ndarray, places: np.ndarray, slots: np.ndarray, made: np.ndarray, count: int
    ) -> int:
        """Adds the keys at these places; returns the number of new keys so far."""
        done, before = 0, -1
        while done < len(places):
            done, now = hash_kernels.add(
                *self._tables(), self._numbers, self._free, keys, places, done, slots, made, count
            )
            self._table.used += now - count
            count = now
            if done < len(places):  # a cluster of keys reaches the end of the tail
                if done == before:
                    raise _too_alike()
                before = done
                self._grow()
        return count

    def _tables(self) -> tuple[np.ndarray, np.ndarray, int, np.ndarray, np.ndarray, int, int]:
        """Returns both tables and the line between moved and unmoved, for compiled functions."""
        new, old, moved = self._table, self._old, self._moved
        if old is None:
            old, moved = _NO_TABLE, _ALL_MOVED
        return new.keys, new.slots, new.homes, old.keys, old.slots, old.homes, moved

    def _make_room(self, more: int) -> None:
        if self._old is not None:
            self._move(_PLACES_MOVED * more)
        if self._table.used + more > _MOST_LOAD * self._table.homes:
            self._grow(more)

    def _grow(self, more: int = 0) -> None:
        """Allocates a larger table, into which later additions move the keys."""
        self._move(None)
        homes = max(self._table.homes * _GROWTH, (self._table.used + more) / _MOST_LOAD)
        if homes >= 2**31:  # more slots than an int32 can count
            what = f"a server's part of a table has {len(self)} keys, and can take no more"
            raise ProgramError(what, hint="use more servers")
        used = self._table.used
        # Moves nothing, but compiles `move` now, outside of any pause.
        hash_kernels.move(_NO_TABLE.keys, _NO_TABLE.slots, 0, 0, _NO_TABLE.keys, _NO_TABLE.slots, 0)
        self._old, self._table, self._moved = self._table, _Table(int(homes)), 0
        self._table.used = used
        self._move(_PLACES_MOVED * more)

    def _move(self, places: int | None) -> None:
        """Moves at least this number of places of the old table, or all that are left."""
        old, new = self._old, self._table
        if old is None:
            return
        started = perf_counter()
        wanted = old.places if places is None else min(old.places, self._moved + places)
        self._moved = hash_kernels.move(
            old.keys, old.slots, self._moved, wanted, new.keys, new.slots, new.homes
        )
        if self._moved < 0:
            raise _too_alike()
        if self._moved >= old.places:
            self._old, self._moved = None, 0
        self.longest_pause_s = max(self.longest_pause_s, perf_counter() - started)


class _Table:
    """The arrays of one table, and the number of keys it is meant for."""

    def __init__(self, homes: int, tail: int = _TAIL) -> None:
        self.homes = homes
        self.keys = zeros(homes + tail, np.int64)
        self.slots = zeros(homes + tail, np.int32)
        self.used = 0

    @property
    def places(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.slots.nbytes


_NO_TABLE = _Table(0, 1)
_ALL_MOVED = 2**62


def _too_alike() -> ProgramError:
    what = f"more than {_TAIL} keys of a table have hashes that are alike"
    return ProgramError(
        what, hint="keys from untrusted sources may collide on purpose; hash them first"
    )

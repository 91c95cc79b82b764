"""Which slot a key's row is in: open addressing, in a table that grows a piece at a time.

A table that is too full moves into a larger one from its beginning to its end, a piece with every
addition. Where one looks for a key depends on which side of the line between moved and unmoved its
home is. Nobody waits for more than such a piece. What runs for each key is in `probing`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables import probing
from jaxfleet.tables.pages import zeros
from jaxfleet.tables.probing import EMPTY, FREE, NEXT_SLOT, NOWHERE, ZERO_SLOT

_LEAST_HOMES = 1024
_MOST_LOAD = 0.8  # of the homes: a key's place is then 3 on average, a new one's 13
_GROWTH = 1.5  # homes of the next table; 2 would leave more of it empty
_PLACES_MOVED = 16  # for each key that is added; so the old table is empty before the new is full
_ADDED_AT_ONCE = 4096  # keys, between two pieces that move
_TAIL = 512  # places after the last home; a cluster that needs more makes the table grow


class Index:
    """Gives each of its keys a slot, from 0 on; slots of removed keys are used again."""

    def __init__(self) -> None:
        self._table = _Table(_LEAST_HOMES)
        self._old: _Table | None = None
        self._moved = 0  # places of the old table before which nothing is left
        self._numbers = probing.no_keys()
        self._free = np.empty(0, np.int32)
        self.longest_pause_s = 0.0

    def __len__(self) -> int:
        """Returns how many keys there are."""
        return int(self._numbers[NEXT_SLOT] - self._numbers[FREE])

    @property
    def slots(self) -> int:
        """How many slots were ever used."""
        return int(self._numbers[NEXT_SLOT])

    @property
    def growing(self) -> bool:
        """Whether keys are in two tables, on their way to the larger."""
        return self._old is not None

    @property
    def nbytes(self) -> int:
        """How much memory it holds."""
        old = 0 if self._old is None else self._old.nbytes
        return self._table.nbytes + old + self._free.nbytes

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns int32[n], the slot of each key, `NOWHERE` for one that has none.

        Args:
            keys: int64[n].
        """
        slots = np.empty(len(keys), np.int32)
        zero = int(self._numbers[ZERO_SLOT])
        if self._old is None:
            probing.find(self._table.keys, self._table.slots, self._table.homes, zero, keys, slots)
        else:
            probing.find_in_two(*self._tables(), zero, keys, slots)
        return slots

    def add(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gives slots to the keys that have none.

        Args:
            keys: int64[n], any; of a key that comes twice the second is as one that was there.

        Returns:
            int32[n], the slot of each; int64[m], the places in `keys` of those that had none.
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
        """Yields what `add` returns; where what is done meanwhile fails, new keys go again.

        So no key is left with a slot that nothing was put into: also not by an interrupt.
        """
        slots, made = self.add(keys)
        try:
            yield slots, made
        except BaseException:
            self.remove(keys[made])
            raise

    def remove(self, keys: np.ndarray) -> np.ndarray:
        """Takes keys out, and returns int32[m], the slots of those that were there.

        Args:
            keys: int64[n].
        """
        slots = np.empty(len(keys), np.int32)
        if not len(keys):
            return slots
        count = probing.remove(*self._tables(), self._numbers, keys, slots)
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
        """Adds the keys of these places; returns how many were made so far."""
        done, before = 0, -1
        while done < len(places):
            done, now = probing.add(
                *self._tables(), self._numbers, self._free, keys, places, done, slots, made, count
            )
            self._table.used += now - count
            count = now
            if done < len(places):  # keys one beside the other reach to the tail's end
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
        """Begins a larger table, into which later additions move what is in this one."""
        self._move(None)
        homes = max(self._table.homes * _GROWTH, (self._table.used + more) / _MOST_LOAD)
        if homes >= 2**31:  # more slots than an int32 has numbers
            what = f"a server's part of a table has {len(self)} keys, and can take no more"
            raise ProgramError(what, hint="use more servers")
        used = self._table.used
        # Moves nothing: so that compiling it is no part of a pause.
        probing.move(_NO_TABLE.keys, _NO_TABLE.slots, 0, 0, _NO_TABLE.keys, _NO_TABLE.slots, 0)
        self._old, self._table, self._moved = self._table, _Table(int(homes)), 0
        self._table.used = used
        self._move(_PLACES_MOVED * more)

    def _move(self, places: int | None) -> None:
        """Moves at least so many places of the old table, or all that are left."""
        old, new = self._old, self._table
        if old is None:
            return
        started = perf_counter()
        wanted = old.places if places is None else min(old.places, self._moved + places)
        self._moved = probing.move(
            old.keys, old.slots, self._moved, wanted, new.keys, new.slots, new.homes
        )
        if self._moved < 0:
            raise _too_alike()
        if self._moved >= old.places:
            self._old, self._moved = None, 0
        self.longest_pause_s = max(self.longest_pause_s, perf_counter() - started)


class _Table:
    """The arrays, and how many keys are meant to be in them."""

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
    return ProgramError(what, hint="keys that nobody chose for it do not; hash them on the way in")

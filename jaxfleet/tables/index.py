"""Which slot a key's row is in: open addressing, compiled.

A table is two arrays, keys and slots, probed one place after the other from a key's home; what
stands between a key's home and its place is never empty. Homes are in the order of the keys'
hashes. So a table that is too full moves into a larger one from its beginning to its end, a piece
with every addition, and where one looks for a key depends on which side of the line between
moved and unmoved its home is. Nobody waits for more than such a piece.
"""

from time import perf_counter

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.buckets import mixed
from jaxfleet.tables.compiled import compiled, inlined
from jaxfleet.tables.pages import zeros

EMPTY = 0  # as a place's key: fresh memory is zeros, and costs nothing until it is written
NOWHERE = -1  # as a slot: the key has none

_LEAST_HOMES = 1024
_MOST_LOAD = 0.8  # of the homes: a key's place is then 3 on average, a new one's 13
_GROWTH = 1.5  # homes of the next table; 2 would leave more of it empty
_PLACES_MOVED = 16  # for each key that is added; so the old table is empty before the new is full
_ADDED_AT_ONCE = 4096  # keys, between two pieces that move
_TAIL = 512  # places after the last home; a cluster that needs more makes the table grow
_LOW = np.uint64(0xFFFFFFFF)

# numbers that compiled functions read and write, in one array
_ZERO_SLOT = 0  # the slot of key 0, which has no place as 0 is EMPTY
_NEXT_SLOT = 1  # the first that was never used
_FREE = 2  # how many of the free ones there are
_NUMBERS = 3


class Index:
    """Gives each of its keys a slot, from 0 on; slots of removed keys are used again."""

    def __init__(self) -> None:
        self._table = _Table(_LEAST_HOMES)
        self._old: _Table | None = None
        self._moved = 0  # places of the old table before which nothing is left
        self._numbers = np.array([NOWHERE, 0, 0], np.int64)
        self._free = np.empty(0, np.int32)
        self.longest_pause_s = 0.0

    def __len__(self) -> int:
        """Returns how many keys there are."""
        return int(self._numbers[_NEXT_SLOT] - self._numbers[_FREE])

    @property
    def slots(self) -> int:
        """How many slots were ever used."""
        return int(self._numbers[_NEXT_SLOT])

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
        zero = int(self._numbers[_ZERO_SLOT])
        if self._old is None:
            _find(self._table.keys, self._table.slots, self._table.homes, zero, keys, slots)
        else:
            _find_in_two(*self._tables(), zero, keys, slots)
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
        for begin in range(0, len(absent), _ADDED_AT_ONCE):
            piece = absent[begin : begin + _ADDED_AT_ONCE]
            self._make_room(len(piece))
            count = self._add(keys, piece, slots, made, count)
        return slots, made[:count]

    def remove(self, keys: np.ndarray) -> np.ndarray:
        """Takes keys out, and returns int32[m], the slots of those that were there.

        Args:
            keys: int64[n].
        """
        slots = np.empty(len(keys), np.int32)
        if not len(keys):
            return slots
        count = _remove(*self._tables(), self._numbers, keys, slots)
        freed = slots[:count]
        kept = int(self._numbers[_FREE])
        if kept + count > len(self._free):
            more = np.empty(2 * (kept + count), np.int32)
            more[:kept] = self._free[:kept]
            self._free = more
        self._free[kept : kept + count] = freed
        self._numbers[_FREE] += count
        self._table.used -= count
        return freed

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns int64[n] and int32[n], all keys and their slots, in no order."""
        self._move(None)
        places = np.flatnonzero(self._table.keys != EMPTY)
        keys, slots = [self._table.keys[places]], [self._table.slots[places]]
        if (zero := int(self._numbers[_ZERO_SLOT])) != NOWHERE:
            keys.append(np.zeros(1, np.int64))
            slots.append(np.array([zero], np.int32))
        return np.concatenate(keys), np.concatenate(slots)

    def _add(
        self, keys: np.ndarray, places: np.ndarray, slots: np.ndarray, made: np.ndarray, count: int
    ) -> int:
        """Adds the keys of these places; returns how many were made so far."""
        done, before = 0, -1
        while done < len(places):
            done, now = _add(
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
        _move(_NO_TABLE.keys, _NO_TABLE.slots, 0, 0, _NO_TABLE.keys, _NO_TABLE.slots, 0)
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
        self._moved = _move(
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


@inlined
def _home(key: np.int64, homes: int) -> np.int64:
    """Returns a key's first place: the lower half of `buckets.mix`, spread over the homes."""
    return np.int64(((mixed(np.uint64(key)) & _LOW) * np.uint64(homes)) >> np.uint64(32))


@inlined
def _place_of(keys: np.ndarray, homes: int, key: np.int64) -> np.int64:
    """Returns where a key is; or, if it is not there, the empty place where it would be."""
    place = _home(key, homes)
    while True:
        found = keys[place]
        if found in (key, EMPTY):
            return place
        place += 1


@compiled("i64[]", "i32[]", "i64", "i64", "i64[]", "i32[]!")
def _find(
    table_keys: np.ndarray,
    table_slots: np.ndarray,
    homes: int,
    zero_slot: int,
    keys: np.ndarray,
    slots: np.ndarray,
) -> None:
    # The loop that look-ups wait for: so it is written out here, and not with `_place_of`.
    for i in range(len(keys)):
        key = keys[i]
        if key == 0:
            slots[i] = zero_slot
            continue
        place = _home(key, homes)
        while True:
            found = table_keys[place]
            if found == key:
                slots[i] = table_slots[place]
                break
            if found == EMPTY:
                slots[i] = NOWHERE
                break
            place += 1


@compiled(
    *("i64[]", "i32[]", "i64"), *("i64[]", "i32[]", "i64"), *("i64", "i64", "i64[]", "i32[]!")
)
def _find_in_two(
    new_keys: np.ndarray,
    new_slots: np.ndarray,
    new_homes: int,
    old_keys: np.ndarray,
    old_slots: np.ndarray,
    old_homes: int,
    moved: int,
    zero_slot: int,
    keys: np.ndarray,
    slots: np.ndarray,
) -> None:
    for i in range(len(keys)):
        key = keys[i]
        if key == 0:
            slots[i] = zero_slot
        elif _home(key, old_homes) < moved:
            place = _place_of(new_keys, new_homes, key)
            slots[i] = new_slots[place] if new_keys[place] == key else NOWHERE
        else:
            place = _place_of(old_keys, old_homes, key)
            slots[i] = old_slots[place] if old_keys[place] == key else NOWHERE


@inlined
def _take_slot(numbers: np.ndarray, free: np.ndarray) -> np.int64:
    if numbers[_FREE] > 0:
        numbers[_FREE] -= 1
        return np.int64(free[numbers[_FREE]])
    numbers[_NEXT_SLOT] += 1
    return numbers[_NEXT_SLOT] - 1


@compiled(
    *("i64[]!", "i32[]!", "i64"), *("i64[]!", "i32[]!", "i64"), "i64",
    *("i64[]!", "i32[]", "i64[]", "i64[]", "i64", "i32[]!", "i64[]!", "i64"),
)  # fmt: skip
def _add(
    new_keys: np.ndarray,
    new_slots: np.ndarray,
    new_homes: int,
    old_keys: np.ndarray,
    old_slots: np.ndarray,
    old_homes: int,
    moved: int,
    numbers: np.ndarray,
    free: np.ndarray,
    keys: np.ndarray,
    places: np.ndarray,
    done: int,
    slots: np.ndarray,
    made: np.ndarray,
    count: int,
) -> tuple[int, int]:
    """Adds keys from `done` on until one has no room; returns how far it came, how many it made."""
    for at in range(done, len(places)):
        i = places[at]
        key = keys[i]
        if key == 0:
            if numbers[_ZERO_SLOT] == NOWHERE:
                numbers[_ZERO_SLOT] = _take_slot(numbers, free)
                made[count] = i
                count += 1
            slots[i] = numbers[_ZERO_SLOT]
            continue
        if _home(key, old_homes) < moved:
            table_keys, table_slots, homes = new_keys, new_slots, new_homes
        else:
            table_keys, table_slots, homes = old_keys, old_slots, old_homes
        place = _place_of(table_keys, homes, key)
        if table_keys[place] == EMPTY:
            if place == len(table_keys) - 1:  # the last stays empty: there every probe ends
                return at, count
            table_keys[place] = key
            table_slots[place] = _take_slot(numbers, free)
            made[count] = i
            count += 1
        slots[i] = table_slots[place]
    return len(places), count


@compiled("i64[]", "i32[]", "i64", "i64", "i64[]!", "i32[]!", "i64")
def _move(
    old_keys: np.ndarray,
    old_slots: np.ndarray,
    begin: int,
    wanted: int,
    new_keys: np.ndarray,
    new_slots: np.ndarray,
    new_homes: int,
) -> int:
    """Moves what is from `begin` to the first empty place from `wanted` on; returns that place.

    A key before an empty place has its home before it, one behind it behind it: so the place is a
    line between homes too.
    """
    for at in range(begin, len(old_keys)):
        key = old_keys[at]
        if key == EMPTY:
            if at >= wanted:
                return at
            continue
        place = _place_of(new_keys, new_homes, key)
        if place == len(new_keys) - 1:
            return -1
        new_keys[place] = key
        new_slots[place] = old_slots[at]
    return len(old_keys)


@compiled(
    *("i64[]!", "i32[]!", "i64"), *("i64[]!", "i32[]!", "i64"), "i64",
    *("i64[]!", "i64[]", "i32[]!"),
)  # fmt: skip
def _remove(
    new_keys: np.ndarray,
    new_slots: np.ndarray,
    new_homes: int,
    old_keys: np.ndarray,
    old_slots: np.ndarray,
    old_homes: int,
    moved: int,
    numbers: np.ndarray,
    keys: np.ndarray,
    slots: np.ndarray,
) -> int:
    """Takes keys out, and moves those behind them nearer to their homes.

    So nothing has to mark a place that somebody left.
    """
    count = 0
    for i in range(len(keys)):
        key = keys[i]
        if key == 0:
            if numbers[_ZERO_SLOT] != NOWHERE:
                slots[count] = numbers[_ZERO_SLOT]
                numbers[_ZERO_SLOT] = NOWHERE
                count += 1
            continue
        if _home(key, old_homes) < moved:
            table_keys, table_slots, homes = new_keys, new_slots, new_homes
        else:
            table_keys, table_slots, homes = old_keys, old_slots, old_homes
        hole = _place_of(table_keys, homes, key)
        if table_keys[hole] == EMPTY:
            continue
        slots[count] = table_slots[hole]
        count += 1
        at = hole + 1
        while table_keys[at] != EMPTY:
            if _home(table_keys[at], homes) <= hole:
                table_keys[hole] = table_keys[at]
                table_slots[hole] = table_slots[at]
                hole = at
            at += 1
        table_keys[hole] = EMPTY
    return count

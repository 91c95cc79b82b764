"""Compiled kernels of the hash index: find, add, move and remove keys.

A table is two arrays, keys and slots, probed linearly from a key's home; places between a key's
home and its place are never empty. Homes are in the order of the keys' hashes. A table that is
moving is two tables, and `moved` is the line: keys whose home in the old one is before it are in
the new one.
"""

import numpy as np

from jaxfleet.tables.buckets import mixed
from jaxfleet.tables.numba_jit import compiled, inlined

EMPTY = 0  # key of an empty place: fresh memory is zeros, and costs nothing until it is written
NOWHERE = -1  # slot of an absent key

# positions in the array of an index's counters, which these functions read and write
ZERO_SLOT = 0  # slot of key 0, which has no place as 0 is EMPTY
NEXT_SLOT = 1  # first slot that was never used
FREE = 2  # number of free slots

_LOW = np.uint64(0xFFFFFFFF)


def no_keys() -> np.ndarray:
    """Returns int64[3], the counters of an empty index."""
    return np.array([NOWHERE, 0, 0], np.int64)


@inlined
def _home(key: np.int64, homes: int) -> np.int64:
    """Returns a key's first place: the lower half of `buckets.mix`, spread over the homes."""
    return np.int64(((mixed(np.uint64(key)) & _LOW) * np.uint64(homes)) >> np.uint64(32))


@inlined
def _place_of(keys: np.ndarray, homes: int, key: np.int64) -> np.int64:
    """Returns the place of a key or, if it is absent, the empty place where it would be."""
    place = _home(key, homes)
    while True:
        found = keys[place]
        if found in (key, EMPTY):
            return place
        place += 1


@compiled("i64[]", "i32[]", "i64", "i64", "i64[]", "i32[]!")
def find(
    table_keys: np.ndarray,
    table_slots: np.ndarray,
    homes: int,
    zero_slot: int,
    keys: np.ndarray,
    slots: np.ndarray,
) -> None:
    """Writes the slot of each key, `NOWHERE` for absent ones."""
    # The hot loop of look-ups, so it is inlined here instead of calling `_place_of`.
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
def find_in_two(
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
    """Writes the slot of each key, as `find`, while a table is moving."""
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
    if numbers[FREE] > 0:
        numbers[FREE] -= 1
        return np.int64(free[numbers[FREE]])
    numbers[NEXT_SLOT] += 1
    return numbers[NEXT_SLOT] - 1


@compiled(
    *("i64[]!", "i32[]!", "i64"), *("i64[]!", "i32[]!", "i64"), "i64",
    *("i64[]!", "i32[]", "i64[]", "i64[]", "i64", "i32[]!", "i64[]!", "i64"),
)  # fmt: skip
def add(
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
    """Adds keys from `done` on until one has no room; returns the new `done` and `count`."""
    for at in range(done, len(places)):
        i = places[at]
        key = keys[i]
        if key == 0:
            if numbers[ZERO_SLOT] == NOWHERE:
                numbers[ZERO_SLOT] = _take_slot(numbers, free)
                made[count] = i
                count += 1
            slots[i] = numbers[ZERO_SLOT]
            continue
        if _home(key, old_homes) < moved:
            table_keys, table_slots, homes = new_keys, new_slots, new_homes
        else:
            table_keys, table_slots, homes = old_keys, old_slots, old_homes
        place = _place_of(table_keys, homes, key)
        if table_keys[place] == EMPTY:
            if place == len(table_keys) - 1:  # the last place stays empty, so that every probe ends
                return at, count
            table_keys[place] = key
            table_slots[place] = _take_slot(numbers, free)
            made[count] = i
            count += 1
        slots[i] = table_slots[place]
    return len(places), count


@compiled("i64[]", "i32[]", "i64", "i64", "i64[]!", "i32[]!", "i64")
def move(
    old_keys: np.ndarray,
    old_slots: np.ndarray,
    begin: int,
    wanted: int,
    new_keys: np.ndarray,
    new_slots: np.ndarray,
    new_homes: int,
) -> int:
    """Moves places from `begin` to the first empty one from `wanted` on; returns that place.

    Keys before an empty place have their homes before it, keys behind it behind it: so the place
    divides homes too.
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
def remove(
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
    """Removes keys, writes the slots of those that were present, and returns their number.

    Keys behind a removed one shift towards their homes, so no tombstones are needed.
    """
    count = 0
    for i in range(len(keys)):
        key = keys[i]
        if key == 0:
            if numbers[ZERO_SLOT] != NOWHERE:
                slots[count] = numbers[ZERO_SLOT]
                numbers[ZERO_SLOT] = NOWHERE
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

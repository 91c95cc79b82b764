"""What belongs to slots: columns in chunks, which grow by a chunk and never move.

A compiled function is given the addresses of a column's chunks, and finds a slot's place itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxfleet.tables.compiled import compiled, inlined, words_at
from jaxfleet.tables.pages import zeros

_WORD = 4  # bytes; every column's elements are some of them
_CHUNK_BYTES = 1 << 22  # of rows; the system gives memory of this size in large pages
_LEAST_SHIFT, _MOST_SHIFT = 8, 16


@dataclass(frozen=True)
class Kind:
    """What a column holds for each slot: so many elements of a type (0: one, without an axis)."""

    dtype: type[np.generic]
    width: int = 0

    @property
    def words(self) -> int:
        """Of four bytes, for each slot."""
        return np.dtype(self.dtype).itemsize // _WORD * max(1, self.width)


class Column:
    """One column. Memory that no slot used yet is not even touched."""

    def __init__(self, kind: Kind, shift: int) -> None:
        self.kind = kind
        self.shift = shift
        self.addresses = np.empty(0, np.uint64)
        self._chunks: list[np.ndarray] = []

    def reserve(self, slots: int) -> None:
        """Has room for so many slots."""
        lacking = -(-slots >> self.shift) - len(self._chunks)
        if lacking > 0:
            made = [zeros(self.kind.words << self.shift, np.int32) for _ in range(lacking)]
            begins = np.array([chunk.ctypes.data for chunk in made], np.uint64)
            self._chunks += made
            self.addresses = np.concatenate([self.addresses, begins])

    def take(self, slots: np.ndarray) -> np.ndarray:
        """Returns what these slots hold; whatever it may be, where a slot is below 0."""
        found = np.empty(self._shape(len(slots)), self.kind.dtype)
        words = _as_words(found, self.kind.words)
        _take(self.addresses, self.shift, self.kind.words, slots, words)
        return found

    def put(self, slots: np.ndarray, values: np.ndarray) -> None:
        """Has these slots hold these values."""
        given = np.ascontiguousarray(values, self.kind.dtype).reshape(self._shape(len(slots)))
        words = _as_words(given, self.kind.words)
        _put(self.addresses, self.shift, self.kind.words, slots, words)

    def fill(self, slots: np.ndarray, value: float) -> None:
        """Has these slots hold this value in all elements; for types of one word."""
        word = int(np.array(value, self.kind.dtype).view(np.int32))
        _fill(self.addresses, self.shift, self.kind.words, slots, word)

    def _shape(self, count: int) -> tuple[int, ...]:
        return (count, self.kind.width) if self.kind.width else (count,)


class Columns:
    """Several columns of the same slots.

    Args:
        kinds: by name.
    """

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        widest = max(kind.words for kind in kinds.values()) * _WORD
        fits = (_CHUNK_BYTES // widest).bit_length() - 1
        shift = min(max(fits, _LEAST_SHIFT), _MOST_SHIFT)
        self._columns = {name: Column(kind, shift) for name, kind in kinds.items()}

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    @property
    def slot_bytes(self) -> int:
        """How many a slot takes."""
        return sum(column.kind.words for column in self._columns.values()) * _WORD

    def reserve(self, slots: int) -> None:
        """Has room for so many slots."""
        for column in self._columns.values():
            column.reserve(slots)


def _as_words(values: np.ndarray, words: int) -> Any:
    return values.reshape(-1).view(np.int32).reshape(len(values), words)


@inlined
def slot_address(addresses: np.ndarray, shift: int, words: int, slot: int) -> np.uint64:
    """Returns where a slot's elements begin."""
    inside = slot & ((1 << shift) - 1)
    return addresses[slot >> shift] + np.uint64(inside * words * 4)


@compiled("u64[]", "i64", "i64", "i32[]", "i32[,]!")
def _take(
    addresses: np.ndarray, shift: int, words: int, slots: np.ndarray, values: np.ndarray
) -> None:
    for i in range(len(slots)):
        slot = np.int64(slots[i])
        if slot >= 0:
            source = words_at(slot_address(addresses, shift, words, slot))
            for j in range(words):
                values[i, j] = source[j]


@compiled("u64[]", "i64", "i64", "i32[]", "i32[,]")
def _put(
    addresses: np.ndarray, shift: int, words: int, slots: np.ndarray, values: np.ndarray
) -> None:
    for i in range(len(slots)):
        target = words_at(slot_address(addresses, shift, words, np.int64(slots[i])))
        for j in range(words):
            target[j] = values[i, j]


@compiled("u64[]", "i64", "i64", "i32[]", "i32")
def _fill(addresses: np.ndarray, shift: int, words: int, slots: np.ndarray, value: int) -> None:
    for i in range(len(slots)):
        target = words_at(slot_address(addresses, shift, words, np.int64(slots[i])))
        for j in range(words):
            target[j] = value

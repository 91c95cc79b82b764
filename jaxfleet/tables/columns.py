"""Columns of a table in fixed chunks: growth adds a chunk and never moves data.

Growing by reallocation would leave much of a large table's memory with the allocator. A compiled
function takes the addresses of a column's chunks and locates a slot itself.
"""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxfleet.tables.numba_jit import compiled, inlined, words_at

_LEAST_BYTES = 1 << 18  # smaller arrays are left to the allocator
_HUGE_BYTES = 1 << 22  # from here on 2 MB pages pay: a look-up then misses few of them


def zeros(count: int, dtype: type[np.generic]) -> np.ndarray:
    """Returns an array of zeros whose untouched pages take no memory."""
    size = count * np.dtype(dtype).itemsize
    if size < _LEAST_BYTES:
        return np.zeros(count, dtype)
    pages = mmap.mmap(-1, size)
    if size >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype, count)


_WORD = 4  # bytes; each column's element is a multiple
_CHUNK_BYTES = 1 << 22  # of rows; the system backs memory of this size with large pages
_LEAST_SHIFT, _MOST_SHIFT = 8, 16


@dataclass(frozen=True)
class Kind:
    """Element type of a column and number of elements per slot (0: one, without an axis)."""

    dtype: type[np.generic]
    width: int = 0

    @property
    def words(self) -> int:
        return np.dtype(self.dtype).itemsize // _WORD * max(1, self.width)


class Column:
    """One column, whose unused memory is never touched."""

    def __init__(self, kind: Kind, shift: int) -> None:
        self.kind = kind
        self.shift = shift
        self.addresses = np.empty(0, np.uint64)
        self._chunks: list[np.ndarray] = []

    def reserve(self, slots: int) -> None:
        lacking = -(-slots >> self.shift) - len(self._chunks)
        if lacking > 0:
            made = [zeros(self.kind.words << self.shift, np.int32) for _ in range(lacking)]
            begins = np.array([chunk.ctypes.data for chunk in made], np.uint64)
            self._chunks += made
            self.addresses = np.concatenate([self.addresses, begins])

    def take(self, slots: np.ndarray) -> np.ndarray:
        """Returns the values of slots; those of negative slots are arbitrary."""
        found = np.empty(self._shape(len(slots)), self.kind.dtype)
        words = _as_words(found, self.kind.words)
        _take(self.addresses, self.shift, self.kind.words, slots, words)
        return found

    def put(self, slots: np.ndarray, values: np.ndarray) -> None:
        given = np.ascontiguousarray(values, self.kind.dtype).reshape(self._shape(len(slots)))
        words = _as_words(given, self.kind.words)
        _put(self.addresses, self.shift, self.kind.words, slots, words)

    def fill(self, slots: np.ndarray, value: float) -> None:
        """Sets all elements of these slots to a value; for one-word types."""
        word = int(np.array(value, self.kind.dtype).view(np.int32))
        _fill(self.addresses, self.shift, self.kind.words, slots, word)

    def _shape(self, count: int) -> tuple[int, ...]:
        return (count, self.kind.width) if self.kind.width else (count,)


class Columns:
    """Several columns over the same slots, by name."""

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
        return sum(column.kind.words for column in self._columns.values()) * _WORD

    def reserve(self, slots: int) -> None:
        for column in self._columns.values():
            column.reserve(slots)


def _as_words(values: np.ndarray, words: int) -> Any:
    return values.reshape(-1).view(np.int32).reshape(len(values), words)


@inlined
def slot_address(addresses: np.ndarray, shift: int, words: int, slot: int) -> np.uint64:
    """Returns the address of a slot's first element."""
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

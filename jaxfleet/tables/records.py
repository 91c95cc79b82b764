"""A row with all that belongs to it as bytes, and its key as bytes in the order of batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from jaxfleet.tables.batch import RowBatch
from jaxfleet.tables.buckets import bucket_of

_KEY = np.dtype([("bucket", ">u2"), ("key", ">u8")])
_SIGN = np.uint64(1 << 63)  # turned, negative keys are before the others


def key_bytes(keys: np.ndarray) -> list[bytes]:
    """Returns ten bytes a key, in the order of buckets and, in a bucket, of keys."""
    named = np.empty(len(keys), _KEY)
    named["bucket"] = bucket_of(keys)
    named["key"] = keys.view(np.uint64) ^ _SIGN
    return _cut(named.tobytes(), _KEY.itemsize)


def keys_of(names: Sequence[bytes]) -> np.ndarray:
    """Returns int64[n], the keys that were made such bytes."""
    named = np.frombuffer(b"".join(names), _KEY)
    return (named["key"].astype(np.uint64) ^ _SIGN).view(np.int64)


@dataclass(frozen=True)
class Layout:
    """Where in a row's bytes each of its columns is.

    Attributes:
        record: a field for the row, and for each part of its state and each counter.
        state: the names of the state.
    """

    record: np.dtype
    state: tuple[str, ...]

    @classmethod
    def of(cls, batch: RowBatch) -> Self:
        """Returns the layout of a batch's rows, which that of all others of its table is too."""
        columns = {"row": batch.rows} | dict(batch.state) | dict(batch.counters)
        fields = [(name, array.dtype, array.shape[1:]) for name, array in columns.items()]
        return cls(np.dtype(fields), tuple(batch.state))

    def pack(self, batch: RowBatch) -> list[bytes]:
        """Returns the bytes of each row."""
        records = np.empty(len(batch.keys), self.record)
        columns = {"row": batch.rows} | dict(batch.state) | dict(batch.counters)
        for name, array in columns.items():
            records[name] = array
        return _cut(records.tobytes(), self.record.itemsize)

    def unpack(self, keys: np.ndarray, values: Sequence[bytes]) -> RowBatch:
        """Returns a batch of rows that were made such bytes."""
        records = np.frombuffer(b"".join(values), self.record)
        columns = {name: np.ascontiguousarray(records[name]) for name in self.record.names or ()}
        rows = columns.pop("row")
        state = {name: columns.pop(name) for name in self.state}
        return RowBatch(keys, rows, state, columns)


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]

"""Rows spilled to disk: an LMDB file, and the encoding of its records.

Rows on disk belong to the running process, as its memory does. The file is unlinked once open,
writes are never synced, and the file disappears with the process, however that ends. Durable copies
are in checkpoints, which include the rows on disk.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from jaxfleet.errors import JaxfleetError
from jaxfleet.tables.buckets import BUCKETS, bucket_of
from jaxfleet.tables.row_batch import RowBatch

_KEY = np.dtype([("bucket", ">u2"), ("key", ">u8")])
_SIGN = np.uint64(1 << 63)  # flipped, so that negative keys sort first


def key_bytes(keys: np.ndarray) -> list[bytes]:
    """Returns ten bytes a key, which sort by bucket and then by key."""
    named = np.empty(len(keys), _KEY)
    named["bucket"] = bucket_of(keys)
    named["key"] = keys.view(np.uint64) ^ _SIGN
    return _cut(named.tobytes(), _KEY.itemsize)


def keys_of(names: Sequence[bytes]) -> np.ndarray:
    """Returns int64[n], the keys encoded by `key_bytes`."""
    named = np.frombuffer(b"".join(names), _KEY)
    return (named["key"].astype(np.uint64) ^ _SIGN).view(np.int64)


@dataclass(frozen=True)
class Layout:
    """Position of each column in a row's bytes: a field for the row, its state and its counters."""

    record: np.dtype
    state: tuple[str, ...]

    @classmethod
    def of(cls, batch: RowBatch) -> Self:
        columns = {"row": batch.rows} | dict(batch.state) | dict(batch.counters)
        fields = [(name, array.dtype, array.shape[1:]) for name, array in columns.items()]
        return cls(np.dtype(fields), tuple(batch.state))

    def pack(self, batch: RowBatch) -> list[bytes]:
        records = np.empty(len(batch.keys), self.record)
        columns = {"row": batch.rows} | dict(batch.state) | dict(batch.counters)
        for name, array in columns.items():
            records[name] = array
        return _cut(records.tobytes(), self.record.itemsize)

    def unpack(self, keys: np.ndarray, values: Sequence[bytes]) -> RowBatch:
        records = np.frombuffer(b"".join(values), self.record)
        columns = {name: np.ascontiguousarray(records[name]) for name in self.record.names or ()}
        rows = columns.pop("row")
        state = {name: columns.pop(name) for name in self.state}
        return RowBatch(keys, rows, state, columns)


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


T = TypeVar("T")
_FIRST_BYTES = 64 << 20  # initial size of the map, which grows as it fills up
_WINDOW_ROWS = 1 << 16  # approximate number of rows read at once


class Disk:
    """Rows by key on disk. At most one thread at a time may use it.

    The file is by default in the system's folder for temporary files.

    Raises:
        JaxfleetError: no file can be created there.
    """

    def __init__(self, table: str, folder: Path | None = None) -> None:
        self._table = table
        self._folder = folder or Path(tempfile.gettempdir())
        self._counts = np.zeros(BUCKETS, np.int64)
        self._layout: Layout | None = None
        self._env = self._run(self._open)

    def __len__(self) -> int:
        return int(self._counts.sum())

    @property
    def nbytes(self) -> int:
        return int(self._env.stat()["psize"] * (self._env.info()["last_pgno"] + 1))

    def write(self, batch: RowBatch) -> None:
        """Adds rows that are absent; none of them if the disk fails."""
        self.replace(batch.keys[:0], [batch])

    def replace(self, keys: np.ndarray, batches: Sequence[RowBatch]) -> None:
        """Atomically removes the rows of these keys, which are present, and adds others."""
        old, new = key_bytes(keys), [self._packed(batch) for batch in batches]

        def change(transaction: Any) -> None:
            for name in old:
                transaction.delete(name)
            with transaction.cursor() as cursor:
                for names, values in new:
                    cursor.putmulti(zip(names, values, strict=True))

        self._change(change)
        self._count(keys, -1)
        for batch in batches:
            self._count(batch.keys, 1)

    def _packed(self, batch: RowBatch) -> tuple[list[bytes], list[bytes]]:
        if self._layout is None:
            self._layout = Layout.of(batch)
        return key_bytes(batch.keys), self._layout.pack(batch)

    def find(self, keys: np.ndarray) -> RowBatch | None:
        """Returns the rows of those unique keys, int64[n], that are present, and keeps them."""

        def get() -> list[tuple[bytes, bytes]]:
            with self._env.begin() as transaction, transaction.cursor() as cursor:
                return list(cursor.getmulti(key_bytes(keys)))

        return self._pairs(self._run(get))

    def read(self, buckets: range) -> RowBatch | None:
        """Returns the rows of some buckets, by bucket and key."""

        def scan() -> list[tuple[bytes, bytes]]:
            found = []
            stop = buckets.stop.to_bytes(2, "big")
            with self._env.begin() as transaction, transaction.cursor() as cursor:
                if cursor.set_range(buckets.start.to_bytes(2, "big")):
                    for pair in cursor:
                        if pair[0][:2] >= stop:
                            break
                        found.append(pair)
            return found

        return self._pairs(self._run(scan))

    def remove(self, keys: np.ndarray) -> np.ndarray:
        """Removes the rows of those keys that are present, and returns these keys."""
        names, here = key_bytes(keys), np.zeros(len(keys), np.bool_)

        def delete(transaction: Any) -> None:
            here[:] = [transaction.delete(name) for name in names]

        self._change(delete)
        self._count(keys[here], -1)
        return keys[here]

    def windows(self) -> Iterator[range]:
        """Yields all buckets in ranges whose rows fit in memory."""
        ends = np.cumsum(self._counts)
        first = 0
        while first < BUCKETS:
            done = int(ends[first - 1]) if first else 0
            stop = max(int(np.searchsorted(ends, done + _WINDOW_ROWS, "right")), first + 1)
            yield range(first, stop)
            first = stop

    def _open(self) -> Any:
        import lmdb  # noqa: PLC0415  # most tables are in memory

        with tempfile.TemporaryDirectory(prefix="jaxfleet-", dir=self._folder) as folder:
            path = os.path.join(folder, "rows")  # noqa: PTH118  # lmdb takes text
            return lmdb.open(
                path,
                map_size=_FIRST_BYTES,
                subdir=False,
                lock=False,
                sync=False,
                metasync=False,
                meminit=False,
            )

    def _change(self, change: Callable[[Any], None]) -> None:
        """Makes a change, and repeats it with a larger map if lmdb runs out of room."""
        import lmdb  # noqa: PLC0415

        def attempt() -> bool:
            try:
                with self._env.begin(write=True) as transaction:
                    change(transaction)
            except lmdb.MapFullError:
                self._env.set_mapsize(self._env.info()["map_size"] * 2)
                return False
            return True

        while not self._run(attempt):
            pass

    def _run(self, work: Callable[[], T]) -> T:
        import lmdb  # noqa: PLC0415

        try:
            return work()
        except (lmdb.Error, OSError) as error:
            what = (
                f"rows of table '{self._table}' cannot be kept on disk in {self._folder}: {error}"
            )
            hint = "make room there, set TMPDIR to another folder, or raise `memory_rows`"
            raise JaxfleetError(what, hint=hint) from error

    def _count(self, keys: np.ndarray, change: int) -> None:
        self._counts += change * np.bincount(bucket_of(keys), minlength=BUCKETS)

    def _pairs(self, pairs: list[tuple[bytes, bytes]]) -> RowBatch | None:
        return self._unpacked(keys_of([key for key, _ in pairs]), [value for _, value in pairs])

    def _unpacked(self, keys: np.ndarray, values: list[bytes]) -> RowBatch | None:
        if not values:
            return None
        assert self._layout is not None
        return self._layout.unpack(keys, values)


class SpilledKeys:
    """Records the keys of rows that were spilled to disk after they were touched.

    Once recording, it has the key of every row on disk that was touched after the step `_from`.
    """

    def __init__(self) -> None:
        self._wanted = False
        self._latest = -1  # step of the latest event
        self._from = -1
        self._keys: list[np.ndarray] = []
        self._touched: list[np.ndarray] = []

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self._keys, *self._touched))

    def saw(self, step: int) -> None:
        """Records that some row was touched at a step."""
        self._latest = max(self._latest, step)

    def begin(self) -> None:
        """Starts recording; rows already on disk were touched before."""
        if not self._wanted:
            self._wanted = True
            self.forget(self._latest)

    def put(self, step: int) -> None:
        """Notes that rows touched up to a step came from a save, and so are not changes."""
        self.saw(step)
        self.begin()
        self.forget(step)

    def add(self, keys: np.ndarray, touched: np.ndarray) -> None:
        """Records the spilled rows that were touched after `_from`."""
        late = touched > self._from
        if self._wanted and late.any():
            self._keys.append(keys[late])
            self._touched.append(touched[late])

    def since(self, step: int) -> np.ndarray | None:
        """Returns int64[m], with all rows on disk touched after a step; None if unknown."""
        if not self._wanted or step < self._from:
            return None
        found = [
            keys[touched > step] for keys, touched in zip(self._keys, self._touched, strict=True)
        ]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def forget(self, until: int) -> None:
        self._from = max(self._from, until)
        kept = [touched > self._from for touched in self._touched]
        self._keys = [keys[some] for keys, some in zip(self._keys, kept, strict=True) if some.any()]
        self._touched = [t[some] for t, some in zip(self._touched, kept, strict=True) if some.any()]

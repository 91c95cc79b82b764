"""Rows on disk, under those in memory: an lmdb file that nobody else sees.

What is on disk belongs to a running process as its memory does. The file has no name from the
moment that it is open, nothing waits for the disk, and a process that ends takes it along, however
it ends. What is to last is in checkpoints, which have the rows on disk too.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxfleet.errors import JaxfleetError
from jaxfleet.tables.batch import RowBatch
from jaxfleet.tables.buckets import BUCKETS, bucket_of
from jaxfleet.tables.records import Layout, key_bytes, keys_of

T = TypeVar("T")
_FIRST_BYTES = 64 << 20  # of the map, which is made larger as it fills up
_WINDOW_ROWS = 1 << 16  # about, of what is read at once


class Disk:
    """Keeps rows by key. One thread at a time may use it.

    Args:
        table: whose rows they are, for errors.
        folder: where the file is; the system's for temporary files, unless given.

    Raises:
        JaxfleetError: no file can be made there.
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
        """How long the file is."""
        return int(self._env.stat()["psize"] * (self._env.info()["last_pgno"] + 1))

    def write(self, batch: RowBatch) -> None:
        """Takes rows that are not here.

        Raises:
            JaxfleetError: the disk is full, or fails. None of them is here then.
        """
        self.replace(batch.keys[:0], [batch])

    def replace(self, keys: np.ndarray, batches: Sequence[RowBatch]) -> None:
        """Takes out the rows of these keys, which are here, and takes others in, all at once.

        Raises:
            JaxfleetError: the disk is full, or fails. Then all is as it was.
        """
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
        """Returns the rows of those keys that are here, and leaves them.

        Args:
            keys: int64[n], each once.
        """

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
        """Takes out the rows of those keys that are here; returns which those were."""
        names, here = key_bytes(keys), np.zeros(len(keys), np.bool_)

        def delete(transaction: Any) -> None:
            here[:] = [transaction.delete(name) for name in names]

        self._change(delete)
        self._count(keys[here], -1)
        return keys[here]

    def windows(self) -> Iterator[range]:
        """Yields all buckets, so many at a time that their rows fit memory."""
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
        """Makes a change, which lmdb may give up for want of room in its map: then again."""
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

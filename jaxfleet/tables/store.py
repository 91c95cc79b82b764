"""The rows of one table, or of a server's part of it."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.batch import RowBatch
from jaxfleet.tables.buckets import bucket_of, mix
from jaxfleet.tables.spec import Sgd, TableSpec, Uniform


class TableStore:
    """Keeps rows by key, and updates them. One thread at a time may use it.

    Args:
        spec: what the table is.
        share: the part of the table's buckets that are kept here; of a capacity, so much is meant.
    """

    def __init__(self, spec: TableSpec, *, share: float = 1.0) -> None:
        self.spec = spec
        self.share = share
        self._rows: dict[int, np.ndarray] = {}
        self._touched: dict[int, int] = {}
        self._skipped = 0

    def __len__(self) -> int:
        """Returns how many rows there are."""
        return len(self._rows)

    def look_up(self, keys: np.ndarray, *, step: int = 0) -> np.ndarray:
        """Returns rows; makes those that are not there.

        A row whose key is not admitted yet is as the initializer makes it, and is not kept. Rows
        that are there are left as they are: a look-up touches none.

        Args:
            keys: int64[n].
            step: the step that asks, which is what a new row was last touched by.

        Returns:
            float32[n, dim].
        """
        found = np.empty((len(keys), self.spec.dim), np.float32)
        for place, key in enumerate(keys.tolist()):
            found[place] = self._row(key, step)
        return found

    def update(
        self,
        keys: np.ndarray,
        grads: np.ndarray,
        *,
        step: int = 0,
        learning_rate: float | None = None,
        shows: np.ndarray | None = None,
        clicks: np.ndarray | None = None,
    ) -> None:
        """Updates rows by the optimizer; makes those that are not there.

        Args:
            keys: int64[n], each once.
            grads: float32[n, dim].
            step: the step that they are of.
            learning_rate: of this update; the optimizer's own, unless given.
            shows: float32[n], how often each key was shown; for tables with scores.
            clicks: float32[n], how often it was clicked.

        Raises:
            ProgramError: a gradient is not finite, and the table refuses those. Nothing was
                applied.
        """
        finite = np.isfinite(grads).all(axis=1)
        if not finite.all() and self.spec.on_nan == "refuse":
            raise ProgramError(f"table '{self.spec.name}': a gradient is not finite")
        self._skipped += int(np.count_nonzero(~finite))
        optimizer = self.spec.optimizer
        assert isinstance(optimizer, Sgd)
        assert shows is None
        assert clicks is None
        rate = np.float32(optimizer.learning_rate if learning_rate is None else learning_rate)
        for key, grad in zip(keys[finite].tolist(), grads[finite], strict=True):
            self._row(key, step)[:] -= rate * grad
            self._touched[key] = step

    def add(self, keys: np.ndarray, deltas: np.ndarray, *, step: int = 0) -> None:
        """Adds to rows, whatever the optimizer; makes those that are not there.

        Args:
            keys: int64[n], each once.
            deltas: float32[n, dim].
            step: the step that they are of.
        """
        for key, delta in zip(keys.tolist(), deltas, strict=True):
            self._row(key, step)[:] += delta
            self._touched[key] = step

    def shrink(self, step: int) -> int:
        """Takes out the rows that the table's evictions say; returns how many."""
        del step
        return 0

    def clear(self) -> None:
        """Takes out everything."""
        self._rows.clear()
        self._touched.clear()

    def drop(self, buckets: Iterable[int]) -> int:
        """Takes out what is in these buckets, kept elsewhere now; returns how many rows."""
        wanted = set(buckets)
        keys = np.fromiter(self._rows, np.int64)
        gone = [
            k for k, b in zip(keys.tolist(), bucket_of(keys).tolist(), strict=True) if b in wanted
        ]
        for key in gone:
            del self._rows[key], self._touched[key]
        return len(gone)

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all keys and rows: int64[n] and float32[n, dim], by bucket and key."""
        batches = list(self.batches())
        keys = [batch.keys for batch in batches]
        rows = [batch.rows for batch in batches]
        empty = np.empty((0, self.spec.dim), np.float32)
        return np.concatenate([*keys, np.empty(0, np.int64)]), np.concatenate([*rows, empty])

    def batches(self, touched_since: int | None = None) -> Iterator[RowBatch]:
        """Yields everything, in batches of whole buckets, in the order of buckets.

        Args:
            touched_since: what a later step touched, alone, and the keys that left; a store of
                the same spec that had everything up to this step has it all when these are put
                into it.
        """
        since = -(2**62) if touched_since is None else touched_since
        keys = np.array([k for k, at in self._touched.items() if at > since], np.int64)
        keys = keys[np.lexsort((keys, bucket_of(keys)))]
        if len(keys):
            rows = np.stack([self._rows[key] for key in keys.tolist()])
            touched = np.array([self._touched[key] for key in keys.tolist()])
            yield RowBatch(keys, rows, counters={"touched": touched})

    def put(self, batch: RowBatch) -> None:
        """Puts rows in as they were, in the place of those of the same keys."""
        for key in batch.gone.tolist():
            self._rows.pop(key, None)
            self._touched.pop(key, None)
        touched = batch.counters["touched"].tolist()
        for key, row, at in zip(batch.keys.tolist(), batch.rows, touched, strict=True):
            self._rows[key] = row.copy()
            self._touched[key] = at

    def forget_gone(self, until: int) -> None:
        """Forgets keys that went at this step or before: nobody asks for changes since then."""

    def stats(self) -> dict[str, float]:
        """Returns what there is: counts, bytes, seconds."""
        return {"rows": len(self), "skipped": self._skipped}

    def _row(self, key: int, step: int) -> np.ndarray:
        if key not in self._rows:
            initial = self.spec.initializer
            assert isinstance(initial, Uniform), asdict(initial)
            bits = mix(np.arange(self.spec.dim) + np.int64(key))
            unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
            self._rows[key] = initial.low + unit * np.float32(initial.high - initial.low)
            self._touched[key] = step
        return self._rows[key]

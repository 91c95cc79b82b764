"""A table whose least recently used rows are on disk, transparently to its users."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.admission import NO_CANDIDATES
from jaxfleet.tables.buckets import BUCKETS, bucket_of
from jaxfleet.tables.columns import Columns, Kind
from jaxfleet.tables.disk import Disk, SpilledKeys
from jaxfleet.tables.eviction import first_to_go
from jaxfleet.tables.hash_kernels import NOWHERE
from jaxfleet.tables.row_batch import RowBatch, joined, of_buckets, ordered, pieces, taken
from jaxfleet.tables.spec import ByScore, Capacity, TableSpec, Unseen
from jaxfleet.tables.store import TableStore
from jaxfleet.tables.validation import Part

_USED = "used"
_SPARED = 8  # spills 1/8 of the bound more than the surplus, so that this is rare
_CHUNK_ROWS = 1 << 16  # rows written to disk at once
_ANY_NUMBER = 1 << 40


class TieredStore(TableStore):
    """Keeps a bounded number of rows in memory and the others on disk.

    Rows that are looked up or updated are brought into memory; above the spec's bound, the least
    recently used go to disk, many at a time. So memory may exceed the bound by the keys of one
    call. Evictions, saves and all else treat rows alike: no bit of any answer depends on where a
    row is. Candidates of admission stay in memory.

    Args:
        spec: of the table; `memory_rows` is the bound.
        share: the part of the table's buckets that are kept here; the bound is scaled by it.
        folder: where the file of rows is; by default the system's folder for temporary files. The
            file is not a checkpoint: it is deleted with the process.

    Raises:
        ProgramError: the spec is not supported.
        JaxfleetError: no file can be created.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import Constant, TableSpec, TieredStore
        >>> spec = TableSpec(name="users", dim=2, initializer=Constant(0.5), memory_rows=1000)
        >>> store = TieredStore(spec)
        >>> for first in range(0, 5000, 500):
        ...     rows = store.look_up(np.arange(first, first + 500))
        >>> len(store)
        5000
    """

    def __init__(self, spec: TableSpec, *, share: float = 1.0, folder: Path | None = None) -> None:
        if spec.memory_rows is None or spec.memory_rows < 1:
            what = f"table '{spec.name}': {spec.memory_rows} rows in memory"
            raise ProgramError(what, hint="memory_rows is a number from 1 on")
        self._most_in_memory = max(1, int(spec.memory_rows * share))
        self._disk = Disk(spec.name, folder)
        self._late = SpilledKeys()
        self._calls = 0
        super().__init__(spec)

    def __len__(self) -> int:
        return len(self._index) + len(self._disk)

    def peek(self, keys: np.ndarray) -> np.ndarray:
        """Returns rows, as `TableStore.peek`; those on disk stay there."""
        rows = super().peek(keys)
        absent = np.flatnonzero(self._index.find(keys) == NOWHERE)
        if (batch := self._disk_rows(np.unique(keys[absent]))) is not None:
            order = np.argsort(batch.keys)
            places = np.searchsorted(batch.keys, keys[absent], sorter=order)
            places = order[np.minimum(places, len(order) - 1)]
            found = batch.keys[places] == keys[absent]
            rows[absent[found]] = batch.rows[places[found]]
        return rows

    def shrink(self, step: int) -> int:
        before = len(self)
        if any(isinstance(part, Unseen | ByScore) for part in self.spec.evictions):
            for buckets in self._disk.windows():
                self._shrink_on_disk(buckets, step)
        super().shrink(step)
        self._late.saw(step)
        return before - len(self)

    def clear(self, *, step: int = 0) -> None:
        for buckets in self._disk.windows():
            if (batch := self._disk.read(buckets)) is not None:
                self._gone.add(self._disk.remove(batch.keys), step)
        super().clear(step=step)

    def drop(self, buckets: Iterable[int]) -> int:
        wanted, dropped = list(buckets), 0
        for bucket in wanted:
            if (batch := self._disk.read(range(bucket, bucket + 1))) is not None:
                dropped += self._remove(batch.keys)
        return dropped + super().drop(wanted)

    def live(self, buckets: range = range(BUCKETS)) -> Iterator[RowBatch]:
        if not len(self._disk):
            yield from super().live(buckets)
            return
        for window in self._disk.windows():
            some = range(max(buckets.start, window.start), min(buckets.stop, window.stop))
            found = self._disk.read(some) if some else None
            on_disk = [] if found is None else [RowBatch(found.keys, found.rows)]
            yield from pieces(ordered(joined([*super().live(some), *on_disk])))

    def batches(self, touched_since: int | None = None) -> Iterator[RowBatch]:
        """Yields the contents, as `TableStore.batches`, within bounded memory."""
        self._late.begin()
        everything = touched_since is not None and self._rescored > touched_since
        since = None if everything else touched_since
        in_memory = _Stream(super().batches(touched_since))
        for buckets in self._disk.windows():
            parts = [*in_memory.until(buckets), *self._on_disk(buckets, since)]
            if parts:
                yield ordered(joined(parts))

    def put(self, batch: RowBatch) -> None:
        super().put(batch)
        self._late.put(int(batch.counters["touched"].max(initial=-1)))
        self._spill_surplus(batch.keys)

    def forget_gone(self, until: int) -> None:
        super().forget_gone(until)
        self._late.forget(until)

    def stats(self) -> dict[str, float]:
        """Returns statistics, as `TableStore.stats`; bytes are those in memory.

        `rows_on_disk` of all `rows`; `bytes_on_disk`, which does not shrink.
        """
        found = super().stats()
        share = len(self._index) / max(1, len(self))
        found["bytes_live"] = round(found["bytes_live"] * share)
        found["bytes_held"] += self._late.nbytes
        return found | {"rows_on_disk": len(self._disk), "bytes_on_disk": self._disk.nbytes}

    def _make_empty(self) -> None:
        super()._make_empty()
        self._recency = Columns({_USED: Kind(np.int64)})

    def _bring_in(self, keys: np.ndarray) -> None:
        """Moves the rows of these keys, if any, from disk into memory."""
        if not len(self._disk):
            return
        absent = np.unique(keys[self._index.find(keys) == NOWHERE])
        if (batch := self._disk.find(absent)) is None:
            return
        # They leave the disk once they are in memory, so that a failure loses none.
        self._place(batch)
        try:
            self._disk.remove(batch.keys)
        except BaseException:
            self._index.remove(batch.keys)
            raise

    def _settle(self, keys: np.ndarray, step: int) -> None:
        """Marks keys as most recently used, and spills rows above the bound."""
        self._late.saw(step)
        self._spill_surplus(keys)

    def _spill_surplus(self, keys: np.ndarray) -> None:
        self._calls += 1
        slots = self._index.find(keys)
        slots = slots[slots != NOWHERE]
        self._recency.reserve(self._index.slots)
        self._recency[_USED].put(slots, np.full(len(slots), self._calls, np.int64))
        surplus = len(self._index) - self._most_in_memory
        if surplus > 0:
            self._put_on_disk(surplus + self._most_in_memory // _SPARED)

    def _put_on_disk(self, count: int) -> None:
        keys, slots = self._index.items()
        goes = first_to_go(count, keys, self._recency[_USED].take(slots))
        keys, slots = self._sorted(keys[goes], slots[goes])
        for start in range(0, count, _CHUNK_ROWS):
            some = slice(start, start + _CHUNK_ROWS)
            batch = self._rows_of(keys[some], slots[some])
            self._disk.write(batch)
            self._index.remove(batch.keys)
            self._late.add(batch.keys, batch.counters["touched"])

    def _rows_of(self, keys: np.ndarray, slots: np.ndarray) -> RowBatch:
        return self._batch(keys, slots, NO_CANDIDATES, np.empty(0, np.int64))

    def _on_disk(self, buckets: range, since: int | None) -> Iterator[RowBatch]:
        """Yields the rows of some buckets that are on disk and were touched after a step."""
        known = None if since is None else self._late.since(since)
        if known is None:
            batch = self._disk.read(buckets)
        else:
            places = bucket_of(known)
            batch = self._disk.find(known[(places >= buckets.start) & (places < buckets.stop)])
        if batch is not None and since is not None:
            batch = taken(batch, batch.counters["touched"] > since, slice(0))
        if batch is not None and len(batch.keys):
            yield batch

    def _shrink_on_disk(self, buckets: range, step: int) -> None:
        """Shrinks the rows of some buckets on disk, as a store in memory would."""
        if (batch := self._disk.read(buckets)) is None:
            return
        alone = TableStore(replace(self.spec, admission=None, evictions=self._without_capacity()))
        alone.put(batch)
        alone.shrink(step)
        left = list(alone.batches())
        self._disk.replace(batch.keys, left)
        kept = np.concatenate([np.empty(0, np.int64), *(some.keys for some in left)])
        gone = np.setdiff1d(batch.keys, kept)
        self._evictions.remove(gone)
        self._gone.add(gone, step)
        self._evicted += len(gone)

    def _without_capacity(self) -> tuple[Part, ...]:
        return tuple(
            replace(part, rows=_ANY_NUMBER) if isinstance(part, Capacity) else part
            for part in self.spec.evictions
        )

    def _remove(self, keys: np.ndarray) -> int:
        absent = keys[self._index.find(keys) == NOWHERE] if len(self._disk) else keys[:0]
        count = super()._remove(keys)
        return count + len(self._disk.remove(absent)) if len(absent) else count

    def _are_there(self, keys: np.ndarray) -> np.ndarray:
        there = super()._are_there(keys)
        if (batch := self._disk_rows(keys[~there])) is not None:
            there |= np.isin(keys, batch.keys)
        return there

    def _counters(self, keys: np.ndarray) -> dict[str, np.ndarray]:
        counters = super()._counters(keys)
        if (batch := self._disk_rows(keys[self._index.find(keys) == NOWHERE])) is not None:
            order = np.argsort(keys)
            places = order[np.searchsorted(keys, batch.keys, sorter=order)]
            for name, values in counters.items():
                values[places] = batch.counters[name]
        return counters

    def _disk_rows(self, keys: np.ndarray) -> RowBatch | None:
        return self._disk.find(keys) if len(keys) and len(self._disk) else None


def make_store(spec: TableSpec, *, share: float = 1.0) -> TableStore:
    """Returns an empty store for a table, in memory or tiered, for a share of its buckets.

    Raises:
        ProgramError: the spec is not supported.
        JaxfleetError: there is no room for a file.

    Examples:
        >>> from jaxfleet.tables import TableSpec, make_store
        >>> type(make_store(TableSpec(name="users", dim=8))).__name__
        'TableStore'
        >>> type(make_store(TableSpec(name="users", dim=8, memory_rows=1000))).__name__
        'TieredStore'
    """
    if spec.memory_rows is None:
        return TableStore(spec)
    return TieredStore(spec, share=share)


class _Stream:
    """Regroups the batches of a store by other ranges of buckets."""

    def __init__(self, batches: Iterator[RowBatch]) -> None:
        self._batches = batches
        self._next: RowBatch | None = next(batches, None)

    def until(self, buckets: range) -> Iterator[RowBatch]:
        """Yields the contents of these buckets; ranges must be requested in order."""
        while self._next is not None:
            part = of_buckets(self._next, buckets)
            if len(part.keys) or len(part.candidates) or len(part.gone):
                yield part
            lists = (self._next.keys, self._next.candidates, self._next.gone)
            if any(len(keys) and bucket_of(keys[-1:])[0] >= buckets.stop for keys in lists):
                return
            self._next = next(self._batches, None)

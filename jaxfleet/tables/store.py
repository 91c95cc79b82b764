"""In-memory rows of one table, or of a server's part of it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import TypeAlias

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.admission import NO_CANDIDATES, Candidates
from jaxfleet.tables.buckets import BUCKETS, bucket_of
from jaxfleet.tables.columns import Columns, Kind
from jaxfleet.tables.eviction import TOUCHED, TOUCHES, Evictions, Tombstones, no_scores
from jaxfleet.tables.hash_index import Index
from jaxfleet.tables.hash_kernels import NOWHERE
from jaxfleet.tables.initializers import initial_rows
from jaxfleet.tables.merge_pushes import finite
from jaxfleet.tables.optimizers import ROWS, add_rows, update_of
from jaxfleet.tables.row_batch import RowBatch, joined, order_of, whole_buckets
from jaxfleet.tables.spec import TableSpec
from jaxfleet.tables.validation import FINITE, checked

_KEY_BYTES = 8

Replaces: TypeAlias = Callable[[np.ndarray, np.ndarray], None]


class TableStore:
    """Keeps rows by key, and updates them; a `RowKeeper`.

    At most one thread at a time may use it. Steps passed to it must never decrease.

    Raises:
        ProgramError: the spec is not supported.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import Constant, Sgd, TableSpec, TableStore
        >>> spec = TableSpec(name="users", dim=2, initializer=Constant(1.0), optimizer=Sgd(0.5))
        >>> store = TableStore(spec)
        >>> keys = np.array([7, 2**40])
        >>> store.update(keys, np.array([[1.0, 0.0], [0.0, 2.0]]), step=1)
        >>> store.look_up(keys, step=2)
        array([[0.5, 1. ],
               [1. , 0. ]], dtype=float32)
    """

    def __init__(self, spec: TableSpec) -> None:
        if spec.dim < 1:
            raise ProgramError(f"table '{spec.name}': a row has {spec.dim} elements")
        self.spec = spec
        self._update = update_of(spec.optimizer, spec.dim)
        self._evictions = Evictions(spec, self._are_there)
        self._waiting = None if spec.admission is None else Candidates(spec.admission, spec.name)
        initial_rows(spec.initializer, np.empty(0, np.int64), spec.dim)  # fail early
        self._gone = Tombstones()
        self._evicted = self._skipped = self._rescored = 0
        self._longest_eviction_s = 0.0
        self._make_empty()

    def __len__(self) -> int:
        return len(self._index)

    def look_up(self, keys: np.ndarray, *, step: int = 0) -> np.ndarray:
        """Returns float32[n, dim], the rows of int64[n] keys; creates missing ones.

        A row whose key is not admitted yet has its initial values, and is not kept. A look-up does
        not touch present rows.
        """
        keys = _keys(keys)
        self._bring_in(keys)
        if self._waiting is None:
            rows = self._columns[ROWS].take(self._slots(keys, step))
        else:
            rows = self._in_memory(keys)
        self._settle(keys, step)
        return rows

    def peek(self, keys: np.ndarray) -> np.ndarray:
        """Returns float32[n, dim], the rows of int64[n] keys, and changes nothing.

        A key without a row has the values with which its row would begin.
        """
        return self._in_memory(_keys(keys))

    def _in_memory(self, keys: np.ndarray) -> np.ndarray:
        """Returns the rows that are in memory; initial values for other keys."""
        slots = self._index.find(keys)
        rows = self._columns[ROWS].take(slots)
        absent = np.flatnonzero(slots == NOWHERE)
        if len(absent):
            rows[absent] = self._initial(keys[absent])
        return rows

    def update(
        self,
        keys: np.ndarray,
        grads: np.ndarray,
        *,
        step: int = 0,
        learning_rate: float | None = None,
        shows: np.ndarray | None = None,
        clicks: np.ndarray | None = None,
        replaces: Replaces | None = None,
    ) -> None:
        """Updates rows by the optimizer; creates missing ones.

        Arguments are as in `TableAccess.push`. A `learning_rate` overrides the optimizer's, and
        `replaces` is called with the keys whose rows change, and their rows before.

        Raises:
            ProgramError: a gradient is not finite, and the table refuses those; or the rate is not
                finite; or shows are given to a table without scores. Nothing was applied.
        """
        rate = self._update.learning_rate
        if learning_rate is not None:
            rate = checked(f"table '{self.spec.name}': the learning rate", learning_rate, FINITE)

        def apply(slots: np.ndarray, accepted: np.ndarray) -> None:
            self._update.apply(self._columns, slots, accepted, np.float32(rate))

        self._change(apply, keys, grads, step, shows, clicks, replaces)

    def add(
        self,
        keys: np.ndarray,
        deltas: np.ndarray,
        *,
        step: int = 0,
        shows: np.ndarray | None = None,
        clicks: np.ndarray | None = None,
        replaces: Replaces | None = None,
    ) -> None:
        """Adds float32[n, dim] to rows, bypassing the optimizer; otherwise as `update`."""

        def apply(slots: np.ndarray, accepted: np.ndarray) -> None:
            add_rows(self._columns, slots, accepted)

        self._change(apply, keys, deltas, step, shows, clicks, replaces)

    def _change(
        self,
        apply: Callable[[np.ndarray, np.ndarray], None],
        keys: np.ndarray,
        changes: np.ndarray,
        step: int,
        shows: np.ndarray | None,
        clicks: np.ndarray | None,
        replaces: Replaces | None,
    ) -> None:
        if not (self._evictions.scores or (shows is None and clicks is None)):
            raise no_scores(self.spec.name)
        keys, changes = _keys(keys), np.require(changes, np.float32, ["C", "A"])
        self._bring_in(keys)
        kept = finite(self.spec, keys, changes, step)
        if not isinstance(kept, slice):
            self._skipped += len(keys) - len(kept)
        if self._waiting is not None:
            kept = self._admitted(keys, kept, step)
        slots = self._slots(keys[kept], step)
        if replaces is not None:
            replaces(keys[kept], self._columns[ROWS].take(slots))
        apply(slots, changes[kept])
        self._evictions.touch(self._columns, slots, _step(step))
        self._evictions.count(self._columns, slots, kept, shows, clicks)
        self._evict_surplus(step)
        self._settle(keys, step)

    def _bring_in(self, keys: np.ndarray) -> None:
        """Makes rows accessible, if some are elsewhere than in memory."""

    def _settle(self, keys: np.ndarray, step: int) -> None:
        """Records the use of rows at a step, and may move others elsewhere."""

    def shrink(self, step: int) -> int:
        """Evicts rows by the table's rules; returns their number. The step is later than any save.

        In a table with scores all shows and clicks decay, so the next delta contains every row.
        """
        started, before = perf_counter(), len(self)
        keys, slots = self._index.items()
        if self._evictions.scores:
            self._rescored = step
        self._evict(keys[self._evictions.shrink(keys, slots, self._columns, step)], step)
        self._evict_surplus(step)
        self._longest_eviction_s = max(self._longest_eviction_s, perf_counter() - started)
        return before - len(self)

    def clear(self, *, step: int = 0) -> None:
        self._gone.add(self._index.items()[0], step)
        if self._waiting is not None:
            self._gone.add(self._waiting.items()[0], step)
            self._waiting.clear()
        self._make_empty()

    def drop(self, buckets: Iterable[int]) -> int:
        """Removes the rows of buckets that moved elsewhere; returns their number."""
        wanted = np.fromiter(buckets, np.int32)
        if self._waiting is not None:
            keys = self._waiting.items()[0]
            self._waiting.remove(keys[np.isin(bucket_of(keys), wanted)])
        keys, _ = self._index.items()
        return self._remove(keys[np.isin(bucket_of(keys), wanted)])

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all keys and rows: int64[n] and float32[n, dim], by bucket and key."""
        empty = RowBatch(np.empty(0, np.int64), np.empty((0, self.spec.dim), np.float32))
        together = joined([*self.live()] or [empty])
        return together.keys, together.rows

    def live(self, buckets: range = range(BUCKETS)) -> Iterator[RowBatch]:
        """Yields only the keys and rows of some buckets, in the order of `batches`."""
        keys, slots = self._index.items()
        places = bucket_of(keys)
        here = (places >= buckets.start) & (places < buckets.stop)
        keys, slots = self._sorted(keys[here], slots[here])
        places = bucket_of(keys)
        for ends in whole_buckets([places]):
            some = slice(*np.searchsorted(places, ends))
            yield RowBatch(keys[some], self._columns[ROWS].take(slots[some]))

    def batches(self, touched_since: int | None = None) -> Iterator[RowBatch]:
        """Yields the contents, as `RowKeeper.batches`; the store may not change meanwhile.

        A store of the same spec with the state at the step `touched_since` that `put`s them has the
        current state.
        """
        self._gone.begin()
        keys, slots = self._index.items()
        if touched_since is not None and self._rescored <= touched_since:
            late = self._columns[TOUCHED].take(slots) > touched_since
            keys, slots = keys[late], slots[late]
        keys, slots = self._sorted(keys, slots)
        waiting = NO_CANDIDATES if self._waiting is None else self._waiting.since(touched_since)
        gone = np.empty(0, np.int64) if touched_since is None else self._gone.since(touched_since)
        gone, _ = self._sorted(gone, np.empty(len(gone), np.int32))
        buckets = [bucket_of(some) for some in (keys, waiting[0], gone)]
        for first, last in whole_buckets(buckets):
            rows, candidates, left = (slice(*np.searchsorted(at, (first, last))) for at in buckets)
            yield self._batch(keys[rows], slots[rows], [a[candidates] for a in waiting], gone[left])

    def put(self, batch: RowBatch) -> None:
        self._gone.begin()
        if len(self):
            self._remove(np.unique(np.concatenate([batch.keys, batch.candidates, batch.gone])))
        if self._waiting is not None:
            self._waiting.remove(_keys(batch.gone))
            self._waiting.remove(_keys(batch.keys))
            self._waiting.put(_keys(batch.candidates), batch.counts, batch.counted)
        self._place(batch)
        self._evictions.add(_keys(batch.keys))

    def forget_gone(self, until: int) -> None:
        self._gone.forget(until)

    def stats(self) -> dict[str, float]:
        """Returns statistics.

        `rows` and `candidates` held; rows `evicted` and gradients `skipped` so far; `bytes_live` of
        keys, rows, optimizer state and counters of the live rows; `bytes_held`, including the index
        and free slots; `longest_pause_s`, of a piece of the index's growth (one per 4096 new keys)
        or of an eviction.
        """
        waiting = 0 if self._waiting is None else self._waiting.nbytes
        slot_bytes = self._columns.slot_bytes
        held = self._index.nbytes + self._index.slots * slot_bytes + waiting + self._gone.nbytes
        held += self._evictions.nbytes
        return {
            "rows": len(self),
            "candidates": 0 if self._waiting is None else len(self._waiting),
            "evicted": self._evicted,
            "skipped": self._skipped,
            "bytes_live": len(self) * (_KEY_BYTES + slot_bytes),
            "bytes_held": held,
            "longest_pause_s": max(self._index.longest_pause_s, self._longest_eviction_s),
        }

    def _make_empty(self) -> None:
        self._index = Index()
        kinds = {ROWS: Kind(np.float32, self.spec.dim)} | self._evictions.counters
        kinds |= {name: state.kind for name, state in self._update.state.items()}
        self._columns = Columns(kinds)
        self._evictions.clear()

    def _place(self, batch: RowBatch) -> None:
        columns = {ROWS: batch.rows} | {**batch.state} | {**batch.counters}
        with self._index.adding(_keys(batch.keys)) as (slots, made):
            self._columns.reserve(self._index.slots)
            self._begin_state(slots[made])
            for name, values in columns.items():
                if name in self._columns:
                    self._columns[name].put(slots, values)

    def _initial(self, keys: np.ndarray) -> np.ndarray:
        return initial_rows(self.spec.initializer, keys, self.spec.dim)

    def _slots(self, keys: np.ndarray, step: int) -> np.ndarray:
        with self._index.adding(keys) as (slots, made):
            if len(made):
                self._columns.reserve(self._index.slots)
                self._begin_state(slots[made])
                self._columns[ROWS].put(slots[made], self._initial(keys[made]))
                self._columns[TOUCHED].fill(slots[made], _step(step))
        self._evictions.add(keys[made])
        return slots

    def _begin_state(self, slots: np.ndarray) -> None:
        """Initializes the state of new rows, whose slots may be reused."""
        for name, state in self._update.state.items():
            self._columns[name].fill(slots, state.initial)
        for name in self._evictions.counters:
            self._columns[name].fill(slots, 0)

    def _admitted(self, keys: np.ndarray, kept: np.ndarray | slice, step: int) -> np.ndarray:
        """Returns the positions of keys that have a row or get one now."""
        assert self._waiting is not None
        places = np.arange(len(keys))[kept]
        absent = self._index.find(keys[places]) == NOWHERE
        if not absent.any():
            return places
        goes_in = ~absent
        goes_in[absent] = self._waiting.admit(keys[places[absent]], _step(step))
        self._gone.add(self._waiting.forget_surplus(), step)
        return places[goes_in]

    def _evict_surplus(self, step: int) -> None:
        started = perf_counter()
        if len(gone := self._evictions.surplus(self._counters)):
            self._evict(gone, step)
            self._longest_eviction_s = max(self._longest_eviction_s, perf_counter() - started)

    def _counters(self, keys: np.ndarray) -> dict[str, np.ndarray]:
        slots = self._index.find(keys)
        return {name: self._columns[name].take(slots) for name in self._evictions.order}

    def _are_there(self, keys: np.ndarray) -> np.ndarray:
        return self._index.find(keys) != NOWHERE

    def _remove(self, keys: np.ndarray) -> int:
        if self._evictions.is_bounded:
            self._evictions.remove(keys[self._are_there(keys)])
        return len(self._index.remove(keys))

    def _evict(self, keys: np.ndarray, step: int) -> None:
        self._remove(keys)
        self._gone.add(keys, step)
        self._evicted += len(keys)

    def _sorted(self, keys: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        order = order_of(keys)
        return keys[order], slots[order]

    def _batch(
        self, keys: np.ndarray, slots: np.ndarray, waiting: Sequence[np.ndarray], gone: np.ndarray
    ) -> RowBatch:
        columns = self._columns
        counters = {name: columns[name].take(slots) for name in self._evictions.counters}
        for name in counters.keys() & {TOUCHED, TOUCHES}:
            counters[name] = counters[name].astype(np.int64)
        candidates, counts, counted = waiting
        return RowBatch(
            keys=keys,
            rows=columns[ROWS].take(slots),
            state={name: columns[name].take(slots) for name in self._update.state},
            counters=counters,
            candidates=candidates,
            counts=counts,
            counted=counted,
            gone=gone,
        )


def _keys(keys: np.ndarray) -> np.ndarray:
    """Returns keys in the form that compiled functions take."""
    return np.require(keys, np.int64, ["C", "A"])


def _step(step: int) -> int:
    """Returns a step in the four bytes kept for each row."""
    if not 0 <= step < 2**31:
        raise ProgramError(f"step {step} of a table", hint="steps are from 0 to 2**31 - 1")
    return step

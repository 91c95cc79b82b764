"""Batches of rows as plain arrays, to save, move, join and split."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jaxfleet.tables.buckets import BUCKETS, bucket_of
from jaxfleet.tables.spec import TableSpec


def _no_keys() -> np.ndarray:
    return np.empty(0, np.int64)


def _no_counts() -> np.ndarray:
    return np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Some of a table's rows; those of one bucket are adjacent and sorted by key.

    Attributes:
        keys: int64[n].
        rows: float32[n, dim].
        state: the optimizer's, by name; float32[n, dim], or int32[n] for a row's own steps.
        counters: always `touched` (int64[n], the last step that made or updated the row);
            `touches` (int64[n]) with a capacity by use; `shows` and `clicks` (float32[n]) with
            scores.
        candidates: int64[m], keys that are not admitted yet.
        counts: int32[m], number of pushes of each candidate.
        counted: int64[m], the last step that pushed each.
        gone: int64[k], removed keys, only from `batches(touched_since=...)`; `put` removes them
            before it adds rows.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import Constant, TableSpec, TableStore
        >>> store = TableStore(TableSpec(name="users", dim=2, initializer=Constant(0.5)))
        >>> rows = store.look_up(np.array([7]), step=3)
        >>> [batch] = store.batches()
        >>> batch.keys, batch.rows, batch.counters["touched"]
        (array([7]), array([[0.5, 0.5]], dtype=float32), array([3]))
    """

    keys: np.ndarray
    rows: np.ndarray
    state: Mapping[str, np.ndarray] = field(default_factory=dict)
    counters: Mapping[str, np.ndarray] = field(default_factory=dict)
    candidates: np.ndarray = field(default_factory=_no_keys)
    counts: np.ndarray = field(default_factory=_no_counts)
    counted: np.ndarray = field(default_factory=_no_keys)
    gone: np.ndarray = field(default_factory=_no_keys)


class RowKeeper(Protocol):
    """Storage of rows that is read and written in batches.

    Step numbers never decrease: where pushes are applied at once they are the server's own count,
    not the trainers'. So a row touched after a save has a later step than the save.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.tables import RowKeeper, TableSpec, TableStore
        >>> def copied(source: RowKeeper, target: RowKeeper) -> None:
        ...     for batch in source.batches():
        ...         target.put(batch)
        >>> spec = TableSpec(name="users", dim=2)
        >>> here, there = TableStore(spec), TableStore(spec)
        >>> rows = here.look_up(np.arange(5))
        >>> copied(here, there)
        >>> len(there)
        5
    """

    @property
    def spec(self) -> TableSpec: ...

    def batches(self, touched_since: int | None = None) -> Iterator[RowBatch]:
        """Yields the contents, by ascending bucket and, in a bucket, by ascending key.

        A batch holds one or several whole buckets.

        Args:
            touched_since: only rows and candidates touched after this step, and the keys removed
                since; None for all rows and no removed keys.
        """
        ...

    def put(self, batch: RowBatch) -> None:
        """Merges a batch: replaces the rows of its keys, and removes those in `gone`."""
        ...

    def forget_gone(self, until: int) -> None:
        """Forgets keys removed at this step or before: no delta will be requested since then."""
        ...


_ROWS_A_BATCH = 1 << 16  # approximate
_NO_ROWS = RowBatch(np.empty(0, np.int64), np.empty((0, 0), np.float32))


def joined(batches: Sequence[RowBatch]) -> RowBatch:
    """Concatenates batches, in their order; a `ValueError` if their columns or dtypes differ."""
    filled = [batch for batch in batches if len(batch.keys)] or list(batches[:1]) or [_NO_ROWS]
    for other in filled[1:]:
        if _kinds(other) != _kinds(filled[0]):
            raise ValueError(f"rows have {_kinds(filled[0])} here, and {_kinds(other)} there")
    every = batches or [_NO_ROWS]
    return RowBatch(
        keys=_join([batch.keys for batch in filled]),
        rows=_join([batch.rows for batch in filled]),
        state={n: _join([batch.state[n] for batch in filled]) for n in filled[0].state},
        counters={n: _join([batch.counters[n] for batch in filled]) for n in filled[0].counters},
        candidates=_join([batch.candidates for batch in every]),
        counts=_join([batch.counts for batch in every]),
        counted=_join([batch.counted for batch in every]),
        gone=_join([batch.gone for batch in every]),
    )


def _join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _kinds(batch: RowBatch) -> dict[str, str]:
    arrays = {"rows": batch.rows} | dict(batch.state) | dict(batch.counters)
    return {name: f"{array.dtype}{list(array.shape[1:])}" for name, array in arrays.items()}


def taken(
    batch: RowBatch,
    rows: np.ndarray | slice,
    candidates: np.ndarray | slice,
    gone: np.ndarray | slice = slice(0),
) -> RowBatch:
    """Returns some rows and candidates of a batch, by mask, position or slice; no removed keys."""
    return RowBatch(
        keys=batch.keys[rows],
        rows=batch.rows[rows],
        state={name: array[rows] for name, array in batch.state.items()},
        counters={name: array[rows] for name, array in batch.counters.items()},
        candidates=batch.candidates[candidates],
        counts=batch.counts[candidates],
        counted=batch.counted[candidates],
        gone=batch.gone[gone],
    )


def ordered(batch: RowBatch) -> RowBatch:
    """Sorts a batch by bucket and, in a bucket, by key."""
    return taken(batch, order_of(batch.keys), order_of(batch.candidates), order_of(batch.gone))


def order_of(keys: np.ndarray) -> np.ndarray:
    """Returns int64[n], the positions of keys by bucket and, in a bucket, by key."""
    return np.lexsort((keys, bucket_of(keys)))


def of_buckets(batch: RowBatch, buckets: range) -> RowBatch:
    """Returns the part of a sorted batch in neighbouring buckets."""
    ends = (buckets.start, buckets.stop)
    lists = (batch.keys, batch.candidates, batch.gone)
    return taken(batch, *(slice(*np.searchsorted(bucket_of(keys), ends)) for keys in lists))


def pieces(batch: RowBatch) -> Iterator[RowBatch]:
    """Splits a sorted batch into pieces of whole buckets."""
    buckets = bucket_of(batch.keys)
    for first, stop in whole_buckets([buckets]):
        yield of_buckets(batch, range(first, stop))


def whole_buckets(buckets: Sequence[np.ndarray]) -> Iterator[tuple[int, int]]:
    """Yields ranges of buckets, each with a batch's number of keys, or a larger bucket alone."""
    ends = np.cumsum(sum(np.bincount(some, minlength=BUCKETS) for some in buckets))
    first = done = 0
    while done < ends[-1]:
        last = max(int(np.searchsorted(ends, done + _ROWS_A_BATCH, "right")), first + 1)
        if ends[last - 1] > done:
            yield first, last
        first, done = last, int(ends[last - 1])

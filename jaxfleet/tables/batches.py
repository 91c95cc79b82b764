"""Joins batches, and takes parts of them."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxfleet.tables.batch import RowBatch
from jaxfleet.tables.buckets import BUCKETS, bucket_of

_ROWS_A_BATCH = 1 << 16  # about
_NO_ROWS = RowBatch(np.empty(0, np.int64), np.empty((0, 0), np.float32))


def joined(batches: Sequence[RowBatch]) -> RowBatch:
    """Returns the batches as one, in their order.

    Raises:
        ValueError: they have other columns or dtypes than each other.
    """
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
    """Returns some rows and some candidates of a batch, by mask, place or slice; no gone keys."""
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
    """Returns a batch by bucket and, in a bucket, by key."""
    return taken(batch, order_of(batch.keys), order_of(batch.candidates), order_of(batch.gone))


def order_of(keys: np.ndarray) -> np.ndarray:
    """Returns int64[n], the places of keys by bucket and, in a bucket, by key."""
    return np.lexsort((keys, bucket_of(keys)))


def of_buckets(batch: RowBatch, buckets: range) -> RowBatch:
    """Returns what is of neighbouring buckets in a batch that is in order."""
    ends = (buckets.start, buckets.stop)
    lists = (batch.keys, batch.candidates, batch.gone)
    return taken(batch, *(slice(*np.searchsorted(bucket_of(keys), ends)) for keys in lists))


def pieces(batch: RowBatch) -> Iterator[RowBatch]:
    """Yields the rows of a batch that is in order, whole buckets at a time."""
    buckets = bucket_of(batch.keys)
    for first, stop in whole_buckets([buckets]):
        yield of_buckets(batch, range(first, stop))


def whole_buckets(buckets: Sequence[np.ndarray]) -> Iterator[tuple[int, int]]:
    """Yields ranges of buckets, each with a batch's number of keys or, if one has more, alone.

    Args:
        buckets: int32[n] each, those of some keys.
    """
    ends = np.cumsum(sum(np.bincount(some, minlength=BUCKETS) for some in buckets))
    first = done = 0
    while done < ends[-1]:
        last = max(int(np.searchsorted(ends, done + _ROWS_A_BATCH, "right")), first + 1)
        if ends[last - 1] > done:
            yield first, last
        first, done = last, int(ends[last - 1])

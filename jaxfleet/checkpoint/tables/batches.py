"""Turns batches into columns and back, and lays changes over what was there before."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxfleet.checkpoint.tables.names import CANDIDATE_COLUMNS, COUNTER, GONE, ROW_COLUMNS, STATE
from jaxfleet.tables import RowBatch
from jaxfleet.tables.batches import joined, ordered, taken
from jaxfleet.tables.buckets import bucket_of


def columns_of(batch: RowBatch) -> dict[str, np.ndarray]:
    """Returns the arrays of a batch by column; those of no candidates, and no gone keys, not."""
    columns = dict(zip(ROW_COLUMNS, (batch.keys, batch.rows), strict=True))
    columns |= {STATE + name: array for name, array in batch.state.items()}
    columns |= {COUNTER + name: array for name, array in batch.counters.items()}
    if len(batch.candidates):
        candidates = (batch.candidates, batch.counts, batch.counted)
        columns |= dict(zip(CANDIDATE_COLUMNS, candidates, strict=True))
    return columns | ({GONE: batch.gone} if len(batch.gone) else {})


def batch_of(columns: Mapping[str, np.ndarray]) -> RowBatch:
    """Returns the batch of some columns.

    Raises:
        KeyError: the keys or the rows are not among them, or some of the candidates' columns.
    """
    known = {name: columns[name] for name in ROW_COLUMNS}
    if any(name in columns for name in CANDIDATE_COLUMNS):
        known |= {name: columns[name] for name in CANDIDATE_COLUMNS}
    if GONE in columns:
        known[GONE] = columns[GONE]
    batch = RowBatch(**known)  # type: ignore[arg-type]  # mappings are not among these
    return replace(batch, state=_under(STATE, columns), counters=_under(COUNTER, columns))


def _under(prefix: str, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(prefix): array
        for name, array in columns.items()
        if name.startswith(prefix)
    }


def index_of(batch: RowBatch) -> np.ndarray:
    """Returns int32[k, 4]: a bucket, and how many rows, candidates and gone keys are of it."""
    lists = [bucket_of(keys) for keys in (batch.keys, batch.candidates, batch.gone)]
    there = np.unique(np.concatenate(lists))
    counts = [np.searchsorted(one, there, "right") - np.searchsorted(one, there) for one in lists]
    return np.stack([there, *counts], axis=1).astype(np.int32)


def size_bytes(batch: RowBatch) -> int:
    """Returns how many bytes the arrays of a batch have."""
    return sum(array.nbytes for array in columns_of(batch).values())


def overlaid(newest_first: Sequence[RowBatch]) -> RowBatch:
    """Returns what is there after changes; the last of the batches is what was there before.

    What the newest batch that knows of a key says of it is so, and nothing of the older ones.
    """
    first, *older = newest_first
    known = [first.keys, first.candidates, first.gone]
    kept = [first]
    for batch in older:
        seen = np.concatenate(known)
        rows = np.isin(batch.keys, seen, invert=True)
        candidates = np.isin(batch.candidates, seen, invert=True)
        known += [batch.keys[rows], batch.candidates[candidates], batch.gone]
        kept.append(taken(batch, rows, candidates))
    return ordered(replace(joined(kept), gone=np.empty(0, np.int64)))

"""A table as pieces of a checkpoint: its header, array names, columns and row ranges.

The rows of a span are stored in order of bucket and key, with an index of the number of rows per
bucket, so a reader of some buckets reads only the blocks of the columns that contain them.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from urllib.parse import quote, unquote

import numpy as np
from msgspec import ValidationError, convert

from jaxfleet.checkpoint.manifest import Count, Piece
from jaxfleet.errors import CheckpointError, ProgramError
from jaxfleet.tables import RowBatch, RowKeeper, TableSpec
from jaxfleet.tables.buckets import BUCKETS, bucket_of
from jaxfleet.tables.row_batch import joined, ordered, taken


@dataclass(frozen=True)
class _HeaderText:
    spec: str
    since: Count | None = None


@dataclass(frozen=True)
class TableHeader:
    """A saved table's header: its spec, and the step that a delta starts from (None if full)."""

    spec: TableSpec
    since: int | None

    def to_array(self) -> np.ndarray:
        text = json.dumps(vars(_HeaderText(self.spec.to_text(), self.since)))
        return np.frombuffer(text.encode(), np.uint8)

    @classmethod
    def from_array(cls, array: np.ndarray) -> "TableHeader":
        try:
            text = convert(json.loads(array.tobytes()), _HeaderText)
            return cls(TableSpec.from_text(text.spec), text.since)
        except (ProgramError, ValidationError) as error:
            raise ValueError(str(error)) from error


ABOUT = "about"
INDEX = "index"
ROW_COLUMNS = ("keys", "rows")  # and one for each of the two below
STATE = "state."
COUNTER = "counter."
CANDIDATE_COLUMNS = ("candidates", "counts", "counted")
GONE = "gone"
_NAME = re.compile(r"table/([^/]+)/(?:about|(\d{1,5})-(\d{1,5})/(.+))", re.DOTALL)


@dataclass(frozen=True, order=True)
class Span:
    """Adjacent buckets, up to and without `stop`, whose rows were written together."""

    first: int
    stop: int


@dataclass(frozen=True)
class ArrayName:
    """The parts of an array's name; no span means an array about the whole table."""

    table: str
    span: Span | None
    column: str

    def __str__(self) -> str:
        where = "" if self.span is None else f"{self.span.first}-{self.span.stop}/"
        return f"table/{quote(self.table, safe='')}/{where}{self.column}"

    @classmethod
    def read(cls, name: str) -> "ArrayName | None":
        """Returns the parsed name, None if it is not a table's."""
        if (match := _NAME.fullmatch(name)) is None:
            return None
        table = unquote(match[1])
        if match[4] is None:
            return cls(table, None, ABOUT)
        return cls(table, Span(int(match[2]), int(match[3])), match[4])


def columns_of(batch: RowBatch) -> dict[str, np.ndarray]:
    """Returns the arrays of a batch by column, without empty columns of candidates and `gone`."""
    columns = dict(zip(ROW_COLUMNS, (batch.keys, batch.rows), strict=True))
    columns |= {STATE + name: array for name, array in batch.state.items()}
    columns |= {COUNTER + name: array for name, array in batch.counters.items()}
    if len(batch.candidates):
        candidates = (batch.candidates, batch.counts, batch.counted)
        columns |= dict(zip(CANDIDATE_COLUMNS, candidates, strict=True))
    return columns | ({GONE: batch.gone} if len(batch.gone) else {})


def batch_of(columns: Mapping[str, np.ndarray]) -> RowBatch:
    """Returns the batch of some columns; raises KeyError if required ones are missing."""
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
    """Returns int32[k, 4]: a bucket, and its numbers of rows, candidates and tombstones."""
    lists = [bucket_of(keys) for keys in (batch.keys, batch.candidates, batch.gone)]
    there = np.unique(np.concatenate(lists))
    counts = [np.searchsorted(one, there, "right") - np.searchsorted(one, there) for one in lists]
    return np.stack([there, *counts], axis=1).astype(np.int32)


def size_bytes(batch: RowBatch) -> int:
    """Returns the total size of a batch's arrays."""
    return sum(array.nbytes for array in columns_of(batch).values())


def overlaid(newest_first: Sequence[RowBatch]) -> RowBatch:
    """Returns the contents after deltas; the last batch is their base.

    For each key, only the newest batch that contains it counts.
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


ALL_BUCKETS = range(BUCKETS)
SPAN_BYTES = 32 << 20  # the size at which a span is closed; two are in memory while one is written
_WHOLE: Mapping[str, int] = MappingProxyType({})


def table_pieces(
    stores: Iterable[RowKeeper], *, buckets: range = ALL_BUCKETS, since: Mapping[str, int] = _WHOLE
) -> Iterator[Piece]:
    """Yields the contents of stores as pieces for `write_part`, along with a server's other values.

    A store must not change before its last piece was taken.

    Args:
        stores: one for each table.
        buckets: the buckets of this process; the parts of a checkpoint together hold all buckets.
        since: by table, the step after which changes are saved; a table without one is saved whole.

    Raises:
        CheckpointError: a store yields its rows out of order.
    """
    for store in stores:
        spec, step = store.spec, since.get(store.spec.name)
        about = ArrayName(spec.name, None, ABOUT)
        yield Piece.whole(str(about), TableHeader(spec, step).to_array(), shared=True)
        for span, batch in spans_of(spec.name, store.batches(step), buckets):
            yield from span_pieces(spec.name, span, batch)


def span_pieces(table: str, span: Span, batch: RowBatch) -> Iterator[Piece]:
    """Yields the arrays of a span, without empty ones other than rows."""
    for column, array in ({INDEX: index_of(batch)} | columns_of(batch)).items():
        yield Piece.whole(str(ArrayName(table, span, column)), array)


def spans_of(
    table: str, batches: Iterable[RowBatch], buckets: range
) -> Iterator[tuple[Span, RowBatch]]:
    """Yields batches joined to spans, which cover all buckets without a gap."""
    start, stop = buckets.start, buckets.start
    waiting: list[RowBatch] = []
    held = 0
    for batch in batches:
        first, last = _ends(table, batch)
        if first < stop or last >= buckets.stop:
            what = f"table `{table}` gave buckets {first} to {last} after {stop - 1}"
            raise CheckpointError(f"{what}, and has {buckets.start} to {buckets.stop - 1}")
        if waiting and held + size_bytes(batch) > SPAN_BYTES:
            yield Span(start, first), joined(waiting)
            start, waiting, held = first, [], 0
        waiting.append(batch)
        held += size_bytes(batch)
        stop = last + 1
    if waiting or start < buckets.stop:
        yield Span(start, buckets.stop), joined(waiting)


def _ends(table: str, batch: RowBatch) -> tuple[int, int]:
    """Returns the first and the last bucket of a batch, after checking its order."""
    ends: list[int] = []
    for keys in (batch.keys, batch.candidates, batch.gone):
        places = bucket_of(keys)
        order = (places[1:] > places[:-1]) | ((places[1:] == places[:-1]) & (keys[1:] > keys[:-1]))
        if not order.all():
            raise CheckpointError(f"table `{table}` gave keys that are not in order, or twice")
        ends += places[[0, -1]].tolist() if len(places) else []
    if not ends:
        raise CheckpointError(f"table `{table}` gave a batch of nothing")
    return min(ends), max(ends)

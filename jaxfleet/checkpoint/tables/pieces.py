"""Cuts what stores hold into pieces of a checkpoint, a few megabytes of neighbouring buckets each.

A span has its rows one after the other, by bucket and key, and an index that says how many are of
which bucket: so whoever wants some buckets reads no more of the columns than the blocks these
are in.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from jaxfleet.checkpoint.pieces import Piece
from jaxfleet.checkpoint.tables.about import About
from jaxfleet.checkpoint.tables.batches import columns_of, index_of, size_bytes
from jaxfleet.checkpoint.tables.names import ABOUT, INDEX, ArrayName, Span
from jaxfleet.errors import CheckpointError
from jaxfleet.tables import RowBatch, RowKeeper
from jaxfleet.tables.batches import joined
from jaxfleet.tables.buckets import BUCKETS, bucket_of

ALL_BUCKETS = range(BUCKETS)
SPAN_BYTES = 32 << 20  # what a span is closed at; two are in memory while one is written
_WHOLE: Mapping[str, int] = MappingProxyType({})


def table_pieces(
    stores: Iterable[RowKeeper],
    *,
    buckets: range = ALL_BUCKETS,
    since: Mapping[str, int] = _WHOLE,
) -> Iterator[Piece]:
    """Yields what stores hold, as pieces for `write_part`; a server's go with its other values.

    A store must not change before its last piece was taken.

    Args:
        stores: one for each table.
        buckets: those that this process has; all parts of a checkpoint together have all.
        since: by table, the step after which changes are wanted; a table that is not there is
            saved whole.

    Raises:
        CheckpointError: a store gives its rows in another order than it must.
    """
    for store in stores:
        spec, step = store.spec, since.get(store.spec.name)
        about = ArrayName(spec.name, None, ABOUT)
        yield Piece.whole(str(about), About(spec, step).to_array(), shared=True)
        for span, batch in spans_of(spec.name, store.batches(step), buckets):
            yield from span_pieces(spec.name, span, batch)


def span_pieces(table: str, span: Span, batch: RowBatch) -> Iterator[Piece]:
    """Yields the arrays of a span; those that nothing is in are left out, but for rows."""
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
    """Returns the first and the last bucket of a batch, once it is seen to be in order."""
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

"""Makes a checkpoint of changes one that stands alone, so that what it stood on can go."""

from collections.abc import Iterator, Mapping
from typing import TypeAlias, cast

from jaxfleet.checkpoint.committing import commit, discard
from jaxfleet.checkpoint.pieces import PartReceipt, Piece, Plain
from jaxfleet.checkpoint.reading import Checkpoint, Part
from jaxfleet.checkpoint.series import CheckpointSeries
from jaxfleet.checkpoint.tables.about import About
from jaxfleet.checkpoint.tables.names import ABOUT, ArrayName, Span
from jaxfleet.checkpoint.tables.pieces import span_pieces, spans_of
from jaxfleet.checkpoint.tables.saved import SavedTable, saved_tables
from jaxfleet.checkpoint.writing import write_part
from jaxfleet.errors import CheckpointError

Facts: TypeAlias = "Mapping[str, Plain]"


def compact(series: CheckpointSeries, step: int) -> None:
    """Writes the checkpoint of a step anew with all rows of its tables, in its old one's place.

    A span of buckets is in memory at a time. Whatever else is in it, and its parts, stay as they
    are. Later checkpoints that hold changes of it can no longer be read: compact the last.

    Raises:
        CheckpointError: it is damaged, or the disk is full. It is as it was.
    """
    chain = series.chain(step)
    newest = chain[0]
    if newest.after is None:
        return
    if later := [other for other in series.steps() if other > step]:
        what = f"step {later[0]} of {series.root} may hold changes of step {step}"
        raise CheckpointError(what, hint=f"compact the last one, step {later[-1]}")
    tables = saved_tables(chain)
    receipts: list[PartReceipt] = []
    try:
        for part in newest.parts:
            pieces = _pieces(newest, part, tables)
            name, facts = part.record.part, cast("Facts", part.record.facts)
            receipts.append(write_part(newest.folder, name, pieces, step=step, facts=facts))
        commit(newest.folder, receipts, step=step, facts=cast("Facts", newest.facts))
    except CheckpointError:
        discard(newest.folder, receipts)
        raise


def _pieces(newest: Checkpoint, part: Part, tables: Mapping[str, SavedTable]) -> Iterator[Piece]:
    """Yields what a part is to have: of tables, all that is of the buckets that it has now."""
    spans: dict[str, set[Span]] = {}
    for record in part.record.pieces:
        name = ArrayName.read(record.name)
        if name is None:
            array = newest.read(record.name, record.start, record.stop)
            yield Piece(record.name, array, record.start, record.whole_shape, record.shared)
        else:
            spans.setdefault(name.table, set()).update([name.span] if name.span else [])
    for table, found in spans.items():
        yield from _whole(tables[table], found)


def _whole(table: SavedTable, spans: set[Span]) -> Iterator[Piece]:
    name = table.spec.name
    about = About(table.spec, None).to_array()
    yield Piece.whole(str(ArrayName(name, None, ABOUT)), about, shared=True)
    for span in sorted(spans):
        buckets = range(span.first, span.stop)
        for inner, batch in spans_of(name, table.batches(buckets), buckets):
            yield from span_pieces(name, inner, batch)

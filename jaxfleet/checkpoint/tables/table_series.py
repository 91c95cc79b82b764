"""Saves, loads and compacts tables: full saves, and deltas between them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from jaxfleet.checkpoint.files import MANIFEST
from jaxfleet.checkpoint.manifest import Link, PartReceipt, Piece, Plain
from jaxfleet.checkpoint.reading import Checkpoint, Part, open_checkpoint
from jaxfleet.checkpoint.saving import commit, discard, save_pieces, write_part
from jaxfleet.checkpoint.series import CheckpointSeries
from jaxfleet.checkpoint.tables.row_pieces import (
    ABOUT,
    ALL_BUCKETS,
    ArrayName,
    Span,
    TableHeader,
    span_pieces,
    spans_of,
    table_pieces,
)
from jaxfleet.checkpoint.tables.saved_tables import SavedTable, layers_in, saved_tables
from jaxfleet.errors import CheckpointError
from jaxfleet.tables import RowKeeper, TableSpec


def load_tables(
    chain: Sequence[Checkpoint], stores: Iterable[RowKeeper], *, buckets: range = ALL_BUCKETS
) -> None:
    """Fills empty stores with their tables' rows of some buckets, bit for bit.

    The number of processes that saved does not matter: each process reads only its own `buckets`.

    Args:
        chain: the checkpoint and its bases: `CheckpointSeries.chain`, or
            `[open_checkpoint(folder)]` for a full save.
        stores: matched to tables by the names of their specs.
        buckets: the buckets of this process.

    Raises:
        CheckpointError: a table is missing, has another dimension or optimizer, or is damaged. The
            stores are then unusable.
    """
    saved = saved_tables(chain)
    for store in stores:
        table = _named(saved, store.spec, chain)
        for batch in table.batches(buckets):
            store.put(batch)


def _named(
    saved: Mapping[str, SavedTable], spec: TableSpec, chain: Sequence[Checkpoint]
) -> SavedTable:
    if (table := saved.get(spec.name)) is None:
        what = f"the checkpoint in {chain[0].folder} has no table `{spec.name}`"
        raise CheckpointError(what, hint=f"it has {', '.join(saved) or 'none'}")
    was = table.spec
    for what, before, now in (
        ("rows of", was.dim, spec.dim),
        ("the optimizer", was.optimizer.kind, spec.optimizer.kind),
    ):
        if before != now:
            message = f"table `{spec.name}` was saved with {what} {before}, and has {now} now"
            hint = "give the table what it had, or export its rows and begin with those"
            raise CheckpointError(message, hint=hint)
    return table


def save_tables(
    series: CheckpointSeries,
    stores: Sequence[RowKeeper],
    *,
    step: int,
    after: int | None = None,
    buckets: range = ALL_BUCKETS,
    facts: Mapping[str, Plain] | None = None,
) -> PartReceipt:
    """Saves tables atomically as the checkpoint of a step.

    Args:
        series: the series to save into.
        stores: one for each table; they must not change meanwhile.
        step: the last step that the stores contain.
        after: the step of an older save of the same stores in this series; only changes since then
            are written, and that save is kept as long as this one. None writes everything.
        buckets: the buckets that the stores have.
        facts: plain data, for readers of the checkpoint.

    Raises:
        CheckpointError: the disk is full or fails, or the base is missing. Existing checkpoints are
            unchanged.
    """
    older = None if after is None else followed(series, after, step)
    since = {} if older is None else dict.fromkeys(layers_in(older), older.step)
    pieces = table_pieces(stores, buckets=buckets, since=since)
    link = None if older is None else Link(older.step, older.sha256)
    folder = series.path(step)
    return save_pieces(folder, pieces, step=step, facts=facts, part="tables", after=link)


def followed(series: CheckpointSeries, after: int, step: int) -> Checkpoint:
    """Returns the checkpoint that a delta is based on, which must be intact and older."""
    if after >= step:
        what = f"the changes until step {step} cannot be of the save of step {after}"
        raise CheckpointError(what, hint="a save of changes needs an older one to follow")
    if not (series.path(after) / MANIFEST).is_file():
        what = f"{series.path(after)} is gone, so the changes since step {after} say nothing"
        raise CheckpointError(what, hint="save everything: after=None")
    return open_checkpoint(series.path(after))


Facts: TypeAlias = "Mapping[str, Plain]"


def compact(series: CheckpointSeries, step: int) -> None:
    """Replaces the checkpoint of a step by one with all rows of its tables.

    One span of buckets is in memory at a time. Other arrays and the division into parts stay as
    they are. Later deltas based on it can no longer be read, so compact the last checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or the disk is full. It is unchanged.
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
    """Yields the pieces of a compacted part: full tables for the buckets that it has now."""
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
    about = TableHeader(table.spec, None).to_array()
    yield Piece.whole(str(ArrayName(name, None, ABOUT)), about, shared=True)
    for span in sorted(spans):
        buckets = range(span.first, span.stop)
        for inner, batch in spans_of(name, table.batches(buckets), buckets):
            yield from span_pieces(name, inner, batch)


@dataclass
class TableSeries:
    """Saves and restores stores, and tracks the base of the next delta.

    Up to `changes` deltas follow a full save; more of them make saves smaller and restores read
    more.
    """

    series: CheckpointSeries
    stores: Sequence[RowKeeper]
    buckets: range = ALL_BUCKETS  # of the stores
    changes: int = 9
    _last: int | None = None  # the last save that contained all of these stores
    _length: int = 0  # the number of deltas that it is built on

    def save(self, step: int) -> PartReceipt:
        """Writes the checkpoint of a step, and removes those that are no longer needed.

        Saving the last saved step again writes a full save.

        Raises:
            CheckpointError: the disk is full or fails. Older checkpoints are unchanged.
        """
        whole = self._last is None or self._last >= step or self._length >= self.changes
        after = None if whole else self._last
        saved = save_tables(self.series, self.stores, step=step, after=after, buckets=self.buckets)
        self._last, self._length = step, 0 if whole else self._length + 1
        self.series.prune()
        for store in self.stores:
            store.forget_gone(step)
        return saved

    def restore(self, step: int | None = None) -> int | None:
        """Fills the stores, which must be empty, from the checkpoint of a step or the last good.

        Returns:
            The step; None if there is no checkpoint.

        Raises:
            CheckpointError: it is damaged, or has other tables.
        """
        found = self.series.latest() if step is None else step
        if found is None:
            return None
        chain = self.series.chain(found)
        load_tables(chain, self.stores, buckets=self.buckets)
        self._last, self._length = found, len(chain) - 1
        return found

    def compact(self) -> None:
        """Replaces the last checkpoint by a full save; the stores are not read.

        Raises:
            CheckpointError: the checkpoint is damaged, or the disk is full. It is unchanged.
        """
        if self._last is not None and self._length:
            compact(self.series, self._last)
            self._length = 0
            self.series.prune()

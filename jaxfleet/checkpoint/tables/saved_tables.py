"""Saved tables, a full save with the deltas laid over it, and exports of tables to files."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from jaxfleet.checkpoint.files import DAMAGED, make_folder, staged_folder
from jaxfleet.checkpoint.reading import Checkpoint
from jaxfleet.checkpoint.saving import cannot_write
from jaxfleet.checkpoint.tables.row_pieces import (
    ABOUT,
    ALL_BUCKETS,
    CANDIDATE_COLUMNS,
    GONE,
    INDEX,
    ArrayName,
    Span,
    TableHeader,
    batch_of,
    index_of,
    overlaid,
)
from jaxfleet.errors import CheckpointError
from jaxfleet.tables import RowBatch, TableSpec
from jaxfleet.tables.access import LiveTable
from jaxfleet.tables.row_batch import joined


@dataclass(frozen=True)
class Layer:
    """A table's contents in one checkpoint: its header, and the columns of each span in order."""

    checkpoint: Checkpoint
    about: TableHeader
    spans: Mapping[Span, frozenset[str]]

    def read(self, buckets: range) -> RowBatch:
        """Returns the contents of some buckets, by bucket and key."""
        self._check_cover(buckets)
        try:
            return joined([self._read_span(span, buckets) for span in self.within(buckets)])
        except (ValueError, KeyError, IndexError) as error:
            raise self._damaged(str(error)) from error

    def within(self, buckets: range) -> Iterator[Span]:
        for span in self.spans:
            if span.first < buckets.stop and buckets.start < span.stop:
                yield span

    def _check_cover(self, buckets: range) -> None:
        at = buckets.start
        for span in self.within(buckets):
            if span.first > at:
                break
            at = span.stop
        if at < buckets.stop:
            name, folder = self.about.spec.name, self.checkpoint.folder
            what = f"{folder} has no bucket {at} of table `{name}`"
            hint = "a server's own checkpoint has that server's buckets; restore one of the job"
            raise CheckpointError(what, hint=hint)

    def _read_span(self, span: Span, buckets: range) -> RowBatch:
        name = self.about.spec.name
        index = self.checkpoint.read(str(ArrayName(name, span, INDEX))).astype(np.int64)
        before, within = index[:, 0] < buckets.start, index[:, 0] < buckets.stop
        starts, stops = index[before, 1:].sum(axis=0), index[within, 1:].sum(axis=0)
        columns = {}
        for column in self.spans[span] - {INDEX}:
            kind = 1 if column in CANDIDATE_COLUMNS else 2 if column == GONE else 0
            array = str(ArrayName(name, span, column))
            if self.checkpoint.shape(array)[0] != index[:, 1 + kind].sum():
                raise ValueError(f"`{array}` has fewer or more rows than its index lists")
            columns[column] = self.checkpoint.read(array, int(starts[kind]), int(stops[kind]))
        batch = batch_of(columns)
        if not np.array_equal(index_of(batch), index[within & ~before]):
            raise ValueError(f"the keys of buckets {span.first} to {span.stop - 1} are of others")
        return batch

    def _damaged(self, reason: str) -> CheckpointError:
        what = f"table `{self.about.spec.name}` cannot be read from {self.checkpoint.folder}"
        return CheckpointError(f"{what}: {reason}", hint=DAMAGED)


def layers_in(checkpoint: Checkpoint) -> dict[str, Layer]:
    """Returns a checkpoint's layer of each table."""
    spans: dict[str, dict[Span, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in map(ArrayName.read, checkpoint.names()):
        if name is not None and name.span is not None:
            spans[name.table][name.span].add(name.column)
        elif name is not None:
            spans.setdefault(name.table, defaultdict(set))
    return {table: _layer(checkpoint, table, found) for table, found in spans.items()}


def _layer(checkpoint: Checkpoint, table: str, spans: Mapping[Span, set[str]]) -> Layer:
    ordered = sorted(spans)
    try:
        about = TableHeader.from_array(checkpoint.read(str(ArrayName(table, None, ABOUT))))
        _check_spans(ordered)
    except ValueError as error:
        what = f"table `{table}` cannot be read from {checkpoint.folder}: {error}"
        raise CheckpointError(what, hint=DAMAGED) from error
    return Layer(checkpoint, about, {span: frozenset(spans[span]) for span in ordered})


def _check_spans(ordered: list[Span]) -> None:
    for one, other in pairwise(ordered):
        if one.stop > other.first:
            raise ValueError(f"its bucket {other.first} is there twice")


@dataclass(frozen=True)
class SavedTable:
    """A saved table; its layers are deltas, the newest first, then their base."""

    spec: TableSpec
    layers: tuple[Layer, ...]

    def batches(self, buckets: range = ALL_BUCKETS) -> Iterator[RowBatch]:
        """Yields the contents of some buckets, by bucket and key; skips data outside of them."""
        whole = self.layers[-1]
        ends = {span.first for span in whole.within(buckets)} | {buckets.start, buckets.stop}
        inside = sorted(end for end in ends if buckets.start <= end <= buckets.stop)
        for start, stop in pairwise(inside):
            batch = overlaid([layer.read(range(start, stop)) for layer in self.layers])
            if len(batch.keys) or len(batch.candidates):
                yield batch

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all keys, ascending, and their rows: int64[n] and float32[n, dim]."""
        batches = list(self.batches())
        keys = np.concatenate([np.empty(0, np.int64), *(batch.keys for batch in batches)])
        empty = np.empty((0, self.spec.dim), np.float32)
        rows = np.concatenate([empty, *(batch.rows for batch in batches)])
        order = np.argsort(keys)
        return keys[order], rows[order]


def saved_tables(chain: Sequence[Checkpoint]) -> Mapping[str, SavedTable]:
    """Returns the tables of a checkpoint.

    Args:
        chain: the checkpoint and its bases: `CheckpointSeries.chain`.

    Raises:
        CheckpointError: a table has a delta without its base.
    """
    layers = [layers_in(checkpoint) for checkpoint in chain]
    return {name: _table(name, layers) for name in (layers[0] if layers else ())}


def _table(name: str, layers: Sequence[Mapping[str, Layer]]) -> SavedTable:
    found: list[Layer] = []
    for here in layers:
        if name in here:
            _check(here[name], found)
            found.append(here[name])
            if here[name].about.since is None:
                return SavedTable(found[0].about.spec, tuple(found))
    what = f"{found[0].checkpoint.folder} has changes of table `{name}` and not what they are of"
    hint = "open it with the others of its series: CheckpointSeries(folder.parent).chain(step)"
    raise CheckpointError(what, hint=hint)


def _check(older: Layer, newer: Sequence[Layer]) -> None:
    if not newer:
        return
    last = newer[-1]
    if last.about.since != older.checkpoint.step:
        what = f"{last.checkpoint.folder} has changes of table `{last.about.spec.name}` since step"
        what = f"{what} {last.about.since}, and follows step {older.checkpoint.step}"
        raise CheckpointError(what, hint=DAMAGED)


KEYS = "keys.npy"
ROWS = "rows.npy"
LINES = 1_000_000  # per text file


def exported(table: LiveTable, folder: str | Path, *, text: bool) -> int:
    """Writes a table into a new folder: `keys.npy` and `rows.npy`, or lines of text."""
    path = Path(folder).absolute()
    return export_text(table, path) if text else export_arrays(table, path)


def export_arrays(table: SavedTable | LiveTable, folder: str | Path) -> int:
    """Writes `keys.npy`, int64[n] ascending, and `rows.npy`, float32[n, dim], into a new folder.

    All keys are in memory, and the rows of a few buckets at a time.

    Returns:
        The number of rows.

    Raises:
        CheckpointError: the folder exists, the disk is full, or the table is damaged.
    """
    with _new_export(table, folder) as stage:
        return _write_arrays(table, stage)


def _write_arrays(table: SavedTable | LiveTable, stage: Path) -> int:
    found = [batch.keys for batch in table.batches()]
    keys = np.sort(np.concatenate([np.empty(0, np.int64), *found]))
    np.save(stage / KEYS, keys)
    shape = (len(keys), table.spec.dim)
    if not len(keys):
        np.save(stage / ROWS, np.empty(shape, np.float32))
        return 0
    rows = open_memmap(stage / ROWS, "w+", np.dtype(np.float32), shape)
    for batch in table.batches():
        rows[np.searchsorted(keys, batch.keys)] = batch.rows
    rows.flush()
    return len(keys)


def export_text(table: SavedTable | LiveTable, folder: str | Path, *, lines: int = LINES) -> int:
    """Writes `00000.tsv`, ... into a new folder: on each line a key, a tab and the row's numbers.

    Keys are in bucket order, as saved. Numbers are the shortest that read back bit for bit.

    Args:
        table: the table to export.
        folder: the folder for the files.
        lines: the maximum per file.

    Returns:
        The number of rows.

    Raises:
        CheckpointError: the folder exists, the disk is full, or the table is damaged.
    """
    with _new_export(table, folder) as stage:
        return _write_text(table.batches(), stage, lines)


def _write_text(batches: Iterable[RowBatch], stage: Path, lines: int) -> int:
    written = 0
    for batch in batches:
        start = 0
        while start < len(batch.keys):
            stop = min(len(batch.keys), start + lines - written % lines)
            with (stage / f"{written // lines:05d}.tsv").open("a", encoding="ascii") as file:
                for key, row in zip(batch.keys[start:stop], batch.rows[start:stop], strict=True):
                    file.write(f"{key}\t{' '.join(map(str, row))}\n")
            written += stop - start
            start = stop
    return written


@contextmanager
def _new_export(table: SavedTable | LiveTable, path: str | Path) -> Iterator[Path]:
    """Yields a folder, which becomes the new folder `path` when the block succeeds."""
    folder = Path(path)
    if folder.exists():
        raise CheckpointError(f"{folder} is there already", hint="export into a new folder")
    make_folder(folder.parent)
    try:
        with staged_folder(folder) as stage:
            yield stage
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise cannot_write(f"table `{table.spec.name}`", folder, error) from error

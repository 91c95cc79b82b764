"""Saved tables: a full save with the deltas laid over it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jaxfleet.checkpoint.checksummed_json import DAMAGED
from jaxfleet.checkpoint.reading import Checkpoint
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
                raise ValueError(f"`{array}` has not as many as its index says")
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

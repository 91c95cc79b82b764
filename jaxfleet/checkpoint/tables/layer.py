"""Reads what one checkpoint has of a table: all of it, or changes."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jaxfleet.checkpoint.reading import Checkpoint
from jaxfleet.checkpoint.sealed import DAMAGED
from jaxfleet.checkpoint.tables.about import About
from jaxfleet.checkpoint.tables.batches import batch_of, index_of
from jaxfleet.checkpoint.tables.names import (
    ABOUT,
    CANDIDATE_COLUMNS,
    GONE,
    INDEX,
    ArrayName,
    Span,
)
from jaxfleet.errors import CheckpointError
from jaxfleet.tables import RowBatch
from jaxfleet.tables.batches import joined


@dataclass(frozen=True)
class Layer:
    """What a checkpoint has of a table.

    Attributes:
        checkpoint: the checkpoint.
        about: what it says of the table.
        spans: the columns of each span, in order; spans do not overlap.
    """

    checkpoint: Checkpoint
    about: About
    spans: Mapping[Span, frozenset[str]]

    def read(self, buckets: range) -> RowBatch:
        """Returns what is of some buckets, by bucket and key.

        Raises:
            CheckpointError: some are not there, or damaged.
        """
        self._check_cover(buckets)
        try:
            return joined([self._read_span(span, buckets) for span in self.within(buckets)])
        except (ValueError, KeyError, IndexError) as error:
            raise self._damaged(str(error)) from error

    def within(self, buckets: range) -> Iterator[Span]:
        """Yields the spans that have some of the buckets."""
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
    """Returns what a checkpoint has of each table.

    Raises:
        CheckpointError: what it says of one makes no sense.
    """
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
        about = About.from_array(checkpoint.read(str(ArrayName(table, None, ABOUT))))
        _check_spans(ordered)
    except ValueError as error:
        what = f"table `{table}` cannot be read from {checkpoint.folder}: {error}"
        raise CheckpointError(what, hint=DAMAGED) from error
    return Layer(checkpoint, about, {span: frozenset(spans[span]) for span in ordered})


def _check_spans(ordered: list[Span]) -> None:
    for one, other in pairwise(ordered):
        if one.stop > other.first:
            raise ValueError(f"its bucket {other.first} is there twice")

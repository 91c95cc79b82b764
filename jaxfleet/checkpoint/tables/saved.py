"""Tables as a checkpoint has them, with those that it holds changes of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jaxfleet.checkpoint.reading import Checkpoint
from jaxfleet.checkpoint.sealed import DAMAGED
from jaxfleet.checkpoint.tables.batches import overlaid
from jaxfleet.checkpoint.tables.layer import Layer, layers_in
from jaxfleet.checkpoint.tables.pieces import ALL_BUCKETS
from jaxfleet.errors import CheckpointError
from jaxfleet.tables import RowBatch, TableSpec


@dataclass(frozen=True)
class SavedTable:
    """One table.

    Attributes:
        spec: what it is.
        layers: changes, the newest first, and last what they are of.
    """

    spec: TableSpec
    layers: tuple[Layer, ...]

    def batches(self, buckets: range = ALL_BUCKETS) -> Iterator[RowBatch]:
        """Yields what it has of some buckets, by bucket and key; what was not saved is not read.

        Raises:
            CheckpointError: some buckets are not there, or damaged.
        """
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
        chain: the checkpoint, and those that it holds changes of: `CheckpointSeries.chain`.

    Raises:
        CheckpointError: changes of a table are there, and not all that they are of.
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

"""A table as it is now, wherever its rows are: its description, and rows a batch at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from jaxfleet.tables.batch import RowBatch
from jaxfleet.tables.spec import TableSpec


@dataclass(frozen=True)
class LiveTable:
    """What `export_arrays` and `export_text` write of a table that is in use.

    Attributes:
        spec: what it is.
        batches: yields its keys and rows, by bucket and key; no step may run meanwhile.
    """

    spec: TableSpec
    batches: Callable[[], Iterator[RowBatch]]

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all keys, ascending, and their rows: int64[n] and float32[n, dim]."""
        found = list(self.batches())
        keys = np.concatenate([np.empty(0, np.int64), *(batch.keys for batch in found)])
        empty = np.empty((0, self.spec.dim), np.float32)
        rows = np.concatenate([empty, *(batch.rows for batch in found)])
        order = np.argsort(keys)
        return keys[order], rows[order]

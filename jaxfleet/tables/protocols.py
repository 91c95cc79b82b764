"""Protocols of tables: look-ups, storage of rows, and a view of the live table."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.row_batch import RowBatch
from jaxfleet.tables.spec import TableSpec


class TableAccess(Protocol):
    """Look-up of rows and push of their gradients."""

    def look_up(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns rows as of the end of the previous step.

        Args:
            table: its name.
            keys: int64[n], unique.

        Returns:
            float32[n, dim]; rows that are not admitted yet have their initial values.
        """
        ...

    def look_up_all(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns rows of several tables in one request, as `look_up`; keys are by table."""
        ...

    def push(
        self,
        table: str,
        keys: np.ndarray,
        grads: np.ndarray,
        *,
        shows: np.ndarray | None = None,
        clicks: np.ndarray | None = None,
    ) -> None:
        """Pushes gradients, which are applied once the step's other summands have arrived.

        Args:
            table: its name.
            keys: int64[n], unique; those of the step's look-up.
            grads: float32[n, dim].
            shows: float32[n], times each key was shown; for tables with scores.
            clicks: float32[n], times it was clicked.
        """
        ...


def unknown_table(table: object, known: Collection[str]) -> ProgramError:
    """Error for a table that is not among those of the step."""
    what = f"there is no table '{table}' in this step, which has {', '.join(known) or 'none'}"
    hint = "give its name; a dense table is none but a parameter, which step.explain() says"
    return ProgramError(what, hint=hint)


class RowKeeper(Protocol):
    """Storage of rows that is read and written in batches.

    Step numbers never decrease: where pushes are applied at once they are the server's own count,
    not the trainers'. So a row touched after a save has a later step than the save.
    """

    @property
    def spec(self) -> TableSpec: ...

    def batches(self, touched_since: int | None = None) -> Iterator[RowBatch]:
        """Yields the contents, by ascending bucket and, in a bucket, by ascending key.

        A batch holds one or several whole buckets.

        Args:
            touched_since: only rows and candidates touched after this step, and the keys removed
                since; None for all rows and no removed keys.
        """
        ...

    def put(self, batch: RowBatch) -> None:
        """Merges a batch: replaces the rows of its keys, and removes those in `gone`."""
        ...

    def forget_gone(self, until: int) -> None:
        """Forgets keys removed at this step or before: no delta will be requested since then."""
        ...


@dataclass(frozen=True)
class LiveTable:
    """The view of a table in use that `export_arrays` and `export_text` write.

    Attributes:
        spec: its spec.
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

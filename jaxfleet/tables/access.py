"""Access to the tables of a step: the protocol, tables in this process, and views for export."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.row_batch import RowBatch
from jaxfleet.tables.spec import TableSpec
from jaxfleet.tables.store import TableStore
from jaxfleet.tables.tiered import make_store


class TableAccess(Protocol):
    """Look-up of rows and push of their gradients."""

    def look_up(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns rows as of the end of the previous step.

        Args:
            table: its name.
            keys: int64[n], unique.

        Returns:
            float32[n, dim]; rows that are not admitted yet have their initial values. They may be
            read-only.
        """
        return self.look_up_all({table: keys})[table]

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


class RowReader(Protocol):
    """Reading of rows outside of a step, which leaves tables as they are."""

    def peek(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns rows as of the end of the previous step, and creates none.

        Args:
            table: its name.
            keys: int64[n], unique.

        Returns:
            float32[n, dim]; a key without a row has the values with which its row would begin.
        """
        ...


def unknown_table(table: object, known: Collection[str]) -> ProgramError:
    """Error for a table that is not among those of the step."""
    what = f"there is no table '{table}' in this step, which has {', '.join(known) or 'none'}"
    hint = "give its name; a dense table is none but a parameter, as step.explain() reports"
    return ProgramError(what, hint=hint)


@dataclass(frozen=True)
class LiveTable:
    """The view of a table in use that `export_arrays` and `export_text` write.

    `batches` yields its keys and rows, by bucket and key; no step may run meanwhile.
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


class LocalTables(TableAccess, RowReader):
    """`TableAccess` for a step without servers, whose tables are in this process."""

    def __init__(self, specs: Iterable[TableSpec]) -> None:
        self.stores = {spec.name: make_store(spec) for spec in specs}
        self.step = 0

    def next_step(self) -> None:
        self.step += 1

    def become(self, others: "LocalTables") -> None:
        """Takes over the rows and the step counter of a checkpoint's tables."""
        self.stores, self.step = others.stores, others.step

    def look_up_all(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {
            name: self._store(name).look_up(some, step=self.step) for name, some in keys.items()
        }

    def peek(self, table: str, keys: np.ndarray) -> np.ndarray:
        return self._store(table).peek(keys)

    def push(
        self,
        table: str,
        keys: np.ndarray,
        grads: np.ndarray,
        *,
        shows: np.ndarray | None = None,
        clicks: np.ndarray | None = None,
    ) -> None:
        store = self.stores[table]
        store.update(keys, grads, step=self.step, shows=shows, clicks=clicks)

    def live(self, table: str) -> LiveTable:
        store = self._store(table)
        return LiveTable(store.spec, store.live)

    def shrink(self, table: str) -> int:
        return self._store(table).shrink(self.step)

    def _store(self, table: str) -> TableStore:
        if (store := self.stores.get(table)) is None:
            raise unknown_table(table, self.stores)
        return store

    def stats(self) -> dict[str, dict[str, Any]]:
        return {name: store.stats() for name, store in self.stores.items()}

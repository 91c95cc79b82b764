"""Tables of this process, for steps that have no servers."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxfleet.tables.access import unknown_table
from jaxfleet.tables.live import LiveTable
from jaxfleet.tables.spec import TableSpec
from jaxfleet.tables.store import TableStore
from jaxfleet.tables.tiered import make_store


class LocalTables:
    """Keeps the tables of a step here.

    Args:
        specs: what they are.
    """

    def __init__(self, specs: Iterable[TableSpec]) -> None:
        self.stores = {spec.name: make_store(spec) for spec in specs}
        self.step = 0

    def next_step(self) -> None:
        """Counts a step: what comes now is of the next one."""
        self.step += 1

    def become(self, others: "LocalTables") -> None:
        """Takes the rows and the count of steps of others, as a checkpoint has them."""
        self.stores, self.step = others.stores, others.step

    def look_up(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns rows, as `TableAccess.look_up` says.

        Raises:
            ProgramError: there is no such table.
        """
        return self._store(table).look_up(keys, step=self.step)

    def look_up_all(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns rows of several tables."""
        return {table: self.look_up(table, of_table) for table, of_table in keys.items()}

    def push(
        self,
        table: str,
        keys: np.ndarray,
        grads: np.ndarray,
        *,
        shows: np.ndarray | None = None,
        clicks: np.ndarray | None = None,
    ) -> None:
        """Updates rows at once: nobody else has gradients of them."""
        store = self.stores[table]
        store.update(keys, grads, step=self.step, shows=shows, clicks=clicks)

    def live(self, table: str) -> LiveTable:
        """Returns a table as it is now, to be exported.

        Raises:
            ProgramError: there is no such table.
        """
        store = self._store(table)
        return LiveTable(store.spec, store.live)

    def shrink(self, table: str) -> int:
        """Takes out the rows that a table's evictions say; returns how many.

        Raises:
            ProgramError: there is no such table.
        """
        return self._store(table).shrink(self.step)

    def _store(self, table: str) -> TableStore:
        if (store := self.stores.get(table)) is None:
            raise unknown_table(table, self.stores)
        return store

    def stats(self) -> dict[str, dict[str, Any]]:
        """Returns what each table counted."""
        return {name: store.stats() for name, store in self.stores.items()}

"""Tables in this process, for steps without servers."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxfleet.tables.protocols import LiveTable, unknown_table
from jaxfleet.tables.spec import TableSpec
from jaxfleet.tables.store import TableStore
from jaxfleet.tables.tiered import make_store


class LocalTables:
    """Keeps the tables of a step in this process."""

    def __init__(self, specs: Iterable[TableSpec]) -> None:
        self.stores = {spec.name: make_store(spec) for spec in specs}
        self.step = 0

    def next_step(self) -> None:
        self.step += 1

    def become(self, others: "LocalTables") -> None:
        """Takes over the rows and the step counter of a checkpoint's tables."""
        self.stores, self.step = others.stores, others.step

    def look_up(self, table: str, keys: np.ndarray) -> np.ndarray:
        return self._store(table).look_up(keys, step=self.step)

    def look_up_all(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
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
        """Updates rows at once, as there are no other trainers."""
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

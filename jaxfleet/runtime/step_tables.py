"""Tables of a step without servers: reading, shrinking, exporting and counting their rows."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet.checkpoint.tables.saved_tables import exported
from jaxfleet.runtime.step_state import AuxiliaryState
from jaxfleet.tables.access import LocalTables
from jaxfleet.tables.host_lookup import looked_up


class TableMethods:
    """Access to the tables of a `Step` between two calls.

    Attributes:
        tables: the tables that it looks up, which are kept in this process.
    """

    tables: LocalTables
    _held: AuxiliaryState | None

    def look_up(self, table: str, keys: Any) -> np.ndarray:
        """Returns rows of a table as of the last step, for example to evaluate a model.

        Args:
            table: its name.
            keys: integers of any shape.

        Returns:
            float32[*keys.shape, dim]; initial values for keys that were never trained.

        Raises:
            FeedError: `keys` are not valid keys.
            ProgramError: the step does not look up this table.
        """
        return looked_up(self.tables, table, np.asarray(keys))

    def shrink(self, table: str) -> int:
        """Evicts rows of a table by its rules; returns their number.

        `Unseen` and `ByScore` require it now and then, but not at every step.

        Args:
            table: its name.

        Raises:
            ProgramError: the step does not look up this table.
        """
        return self.tables.shrink(table)

    def export(self, table: str, folder: str | Path, *, text: bool = False) -> int:
        """Exports a table's rows for other programs; returns their number.

        No step may run meanwhile. All keys are in memory, and some rows at a time.

        Args:
            table: its name.
            folder: a new one: for `keys.npy`, int64[n] ascending, and `rows.npy`, float32[n, dim].
            text: write `00000.tsv`, ... instead: a key, a tab and its row's numbers, a line each.

        Raises:
            CheckpointError: the folder exists already, or cannot be written.
            ProgramError: the step does not look up this table.
        """
        return exported(self.tables.live(table), folder, text=text)

    def stats(self) -> dict[str, Any]:
        """Returns the counters of each table (`tables`), as `TrainerStep.stats`.

        Also the scalars `held` beside the state, such as the scale of a loss; if devices train
        independently, their mean over this process. Not collective.
        """
        held = {} if self._held is None else self._held.numbers()
        return {"tables": self.tables.stats(), "held": held}

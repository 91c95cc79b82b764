"""Tables of a trainer's step: reading, shrinking and exporting rows that servers hold."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet.checkpoint.tables.saved_tables import exported
from jaxfleet.ps.client.remote_tables import RemoteTables
from jaxfleet.runtime.pserver_checkpoint import export_table, meet, shrink_table
from jaxfleet.runtime.trainer_membership import ChangingTrainer
from jaxfleet.tables.host_lookup import looked_up


class TrainerTables(ChangingTrainer):
    """Access to the tables of a `TrainerStep` between two calls, also while its job changes."""

    @property
    def tables(self) -> RemoteTables:
        return self._lines.tables

    def look_up(self, table: str, keys: Any) -> np.ndarray:
        """Returns rows of a table as of the last step, as `Step.look_up`; not collective.

        Raises:
            FeedError: `keys` are not valid keys.
            ProgramError: the step does not look up this table.
            PeerLostError: a server is gone or late.
        """
        return self._through_changes(lambda: looked_up(self.tables, table, np.asarray(keys)))

    def shrink(self, table: str) -> int:
        """Evicts rows of a table, as `Step.shrink`; collective, after the same number of steps.

        In the relaxed modes, a process that returns evicts none where the others have gone on.

        Raises:
            ProgramError: the step does not look up this table.
            PeerLostError: a server, or another trainer, is gone or late.
        """
        return self._through_changes(lambda: self._shrink(table))

    def _shrink(self, table: str) -> int:
        what = self._pause(f"shrink '{table}'")
        return 0 if what is None else shrink_table(self.client, self.tables, table, what)

    def export(self, table: str, folder: str | Path, *, text: bool = False) -> int:
        """Exports a table's rows, as `Step.export`; returns their number.

        Collective, after the same number of steps; trainer 0 writes. It has all keys in memory, and
        some rows at a time. A process that returns writes none again, like `shrink`; it returns 0.

        Raises:
            CheckpointError: the folder exists already, or cannot be written.
            ProgramError: the step does not look up this table.
            PeerLostError: a server, or another trainer, is gone or late.
        """
        # Not again if this trainer has written it when the members of the job change.
        write = functools.cache(lambda: exported(self.tables.live(table), folder, text=text))
        return self._through_changes(lambda: self._export(table, write))

    def _export(self, table: str, write: Callable[[], int]) -> int:
        what = self._pause(f"export '{table}'")
        return 0 if what is None else export_table(self.client, self.tables, table, what, write)

    def _pause(self, what: str) -> str | None:
        """Flushes all trainers' updates; returns a name of the operation, unique at this step.

        Returns None if this process has returned to a step that the others have left: where they do
        not wait at every step, they would not come.
        """
        self._pace.flush()  # also then: its messages end where those of the former process did
        if not self._pace.is_sync and self.client.is_past():
            return None
        what = self.client.unique(what)  # there may be several at one step
        if not self._pace.is_sync:
            meet(self.client, what)
        return what

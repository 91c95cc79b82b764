"""Batches of a trainer: the programs to run for them, and the trainer's own rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.errors import FeedError
from jaxfleet.ir import Program
from jaxfleet.lower.partition import rows_of
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.host_ops import Copies
from jaxfleet.ps.client.trainer_executor import TrainerExecutor, TrainerTables
from jaxfleet.runtime.pserver_job import JobPrograms
from jaxfleet.runtime.step_inputs import check_batch, check_rows
from jaxfleet.runtime.trainer_connection import TrainerSync
from jaxfleet.runtime.transpile import for_slices
from jaxfleet.tables.access import TableAccess

Programs = Callable[[Program], JobPrograms]


@dataclass(frozen=True)
class Variant:
    """The step for one capture of the batch."""

    trainer: TrainerExecutor  # runs this trainer's program
    captured: Captured  # the one-device program
    sharers: int  # number of trainers that share a call's rows; 1 if all are its own

    def run(
        self, state: Mapping[str, Any], data: Sequence[Any], rows: int
    ) -> tuple[dict[str, Any], list[Any]]:
        own, own_rows = self.own(data, rows)
        return self.trainer.run(state, own, rows_of(self.trainer.program, own_rows))

    def own(self, data: Sequence[Any], rows: int) -> tuple[dict[str, Any], int]:
        """Returns this trainer's part of a call's batch, by name, and its number of rows."""
        names = [leaf.name for leaf in self.captured.signature.batch]
        own = rows // self.sharers
        if own < rows:
            start = own * self.trainer.client.me.trainer
            data = [x[start : start + own] if np.ndim(x) else x for x in data]
        return dict(zip(names, data, strict=True)), own


class TrainerBatches:
    """Selects or compiles the step for each batch.

    Args:
        captured: the step.
        job: the programs for batches like the example.
        example: the captured step of those programs.
        is_local: a call passes the trainer's own rows, not the whole batch.
        programs: makes the programs for other batches.
        pace: makes the executor of a step's program.

    Attributes:
        newest: what the last call ran; None before the first.
    """

    def __init__(
        self,
        captured: Captured,
        job: JobPrograms,
        example: Program,
        *,
        is_local: bool,
        programs: Programs,
        pace: TrainerSync,
    ) -> None:
        self._captured, self._job, self._programs, self._pace = captured, job, programs, pace
        self._example = example
        self._is_local = is_local
        self._variants: dict[int | None, Variant] = {}
        self._captured_for: dict[int, Captured] = {}  # by the rows of a call
        self.newest: Variant | None = None

    def check(self, batch: Any) -> tuple[list[Any], int]:
        """Returns the leaves of a call's batch, after checking them, and its number of rows."""
        data, tree = jax.tree_util.tree_flatten(batch)
        return data, check_batch(data, tree, self._captured, devices=1)

    def whole(self, rows: int) -> int:
        """Returns the whole batch's number of rows for a call with this number."""
        return rows * self._job.trainers if self._is_local else rows

    def variant(self, rows: int, client: Client, tables: TableAccess) -> Variant:
        """Returns the step for calls with this number of rows.

        `client` is connected, so servers expect its number of trainers.

        Raises:
            FeedError: trainers cannot share the rows, or servers would need another program.
        """
        if not self._is_local:
            check_rows(rows, self._job.trainers, of="trainers")
        captured = self._computed(rows)
        if captured.rows not in self._variants:
            self._variants[captured.rows] = self._variant(captured, client, tables)
        self.newest = self._variants[captured.rows]
        return self.newest

    def _computed(self, rows: int) -> Captured:
        """Returns the step captured for the whole batch, or for one trainer's rows."""
        if rows not in self._captured_for:
            trainers = self._job.trainers
            if self._pace.is_sync:
                whole = self.whole(rows)
                found = for_slices(self._captured.at(whole), whole, trainers)
            else:
                found = self._captured.at(rows if self._is_local else rows // trainers)
            self._captured_for[rows] = found
        return self._captured_for[rows]

    def _variant(self, captured: Captured, client: Client, tables: TableAccess) -> Variant:
        is_first = captured.program == self._example
        programs = self._job if is_first else self._programs(captured.program)
        if programs.servers != self._job.servers:
            what = "the optimizer depends on the number of rows in the batch, which has changed"
            raise FeedError(what, hint="give every step a batch of the same size")
        own = (
            TrainerTables(programs.trainer, tables) if "tables" in captured.program.attrs else None
        )
        trainer = self._pace.trainer(programs.trainer, client, own)
        sharers = 1 if self._is_local or programs.is_whole else programs.trainers
        return Variant(trainer, captured, sharers)

    @property
    def copies(self) -> Copies:
        """Transferred arrays, and their copies."""
        return sum((variant.trainer.copies for variant in self._variants.values()), Copies())

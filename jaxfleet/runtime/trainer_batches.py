"""What a trainer does with a batch: which programs run for it, and which rows are its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.errors import FeedError
from jaxfleet.ir import Program
from jaxfleet.lower.segments import rows_of
from jaxfleet.ps.client import Client
from jaxfleet.ps.host_run import Copies
from jaxfleet.ps.trainer import Trainer
from jaxfleet.ps.trainer_tables import TrainerTables
from jaxfleet.runtime.feed import check_batch, check_rows
from jaxfleet.runtime.job_programs import JobPrograms
from jaxfleet.runtime.pace import Pace
from jaxfleet.tables.access import TableAccess

Programs = Callable[[Program], JobPrograms]


@dataclass(frozen=True)
class Variant:
    """The step for batches that are captured alike.

    Attributes:
        trainer: runs this trainer's program.
        captured: the one-device program.
        sharers: how many trainers share the rows that a call brings; 1 where all are its own.
    """

    trainer: Trainer
    captured: Captured
    sharers: int

    def run(
        self, state: Mapping[str, Any], data: Sequence[Any], rows: int
    ) -> tuple[dict[str, Any], list[Any]]:
        """Runs a step on this trainer's part of what a call brings, as `Trainer.run` does."""
        own, own_rows = self.own(data, rows)
        return self.trainer.run(state, own, rows_of(self.trainer.program, own_rows))

    def own(self, data: Sequence[Any], rows: int) -> tuple[dict[str, Any], int]:
        """Returns this trainer's part of what a call brings, by name, and its number of rows."""
        names = [leaf.name for leaf in self.captured.signature.batch]
        own = rows // self.sharers
        if own < rows:
            start = own * self.trainer.client.me.trainer
            data = [x[start : start + own] if np.ndim(x) else x for x in data]
        return dict(zip(names, data, strict=True)), own


class TrainerBatches:
    """Makes the step for whatever batches come.

    Args:
        captured: the step.
        job: the programs for batches like the example.
        example: the captured step that those are of.
        is_local: a call brings the trainer's own rows, not the whole batch.
        programs: makes those for others.
        pace: makes what runs a step's program.
    """

    def __init__(
        self,
        captured: Captured,
        job: JobPrograms,
        example: Program,
        *,
        is_local: bool,
        programs: Programs,
        pace: Pace,
    ) -> None:
        self._captured, self._job, self._programs, self._pace = captured, job, programs, pace
        self._example = example
        self._is_local = is_local
        self._variants: dict[int | None, Variant] = {}

    def check(self, batch: Any) -> tuple[list[Any], int]:
        """Returns the leaves of what a call brings, and how many rows they have.

        Raises:
            FeedError: it is not like the example.
        """
        data, tree = jax.tree_util.tree_flatten(batch)
        return data, check_batch(data, tree, self._captured, devices=1)

    def whole(self, rows: int) -> int:
        """Returns how many rows the whole batch has where a call brings so many."""
        return rows * self._job.trainers if self._is_local else rows

    def variant(self, rows: int, client: Client, tables: TableAccess) -> Variant:
        """Returns the step for calls that bring so many rows.

        Args:
            rows: of what a call brings.
            client: has said hello, by which servers know that there are so many trainers.
            tables: those of the job.

        Raises:
            FeedError: trainers cannot share them, or servers would have to do something else.
        """
        if not self._is_local:
            check_rows(rows, self._job.trainers, of="trainers")
        captured = self._captured.at(self._computed(rows))
        if captured.rows not in self._variants:
            self._variants[captured.rows] = self._variant(captured, client, tables)
        return self._variants[captured.rows]

    def _computed(self, rows: int) -> int:
        """Returns how many rows a step is captured for: the whole batch's, or one trainer's."""
        if self._pace.is_sync:
            return self.whole(rows)
        return rows if self._is_local else rows // self._job.trainers

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
        """The arrays that travelled, and the copies that were made of them."""
        return sum((variant.trainer.copies for variant in self._variants.values()), Copies())

"""Protocol of the schedulers, which decide when a server's blocks and tables are updated."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jaxfleet.ps.server.execution_plan import BlockPlan, SentGradients
from jaxfleet.ps.server.outbox import Request
from jaxfleet.ps.server.staleness import ReceivedRows
from jaxfleet.transport.messages import Plain, Tensor

_PER_PUSH = 1024  # bytes of a push besides its arrays, which may be empty


@dataclass(frozen=True, eq=False)
class RowPush:
    """One trainer's push to one table at one step, possibly empty.

    Attributes:
        adds: they are changes of rows instead of gradients.
        received: the rows as its sender received them, if gradients are compensated.
        shows: float32[n], impressions of each key, if given.
        clicks: float32[n], clicks on each key, if given.
    """

    request: Request
    keys: np.ndarray
    grads: np.ndarray
    learning_rate: float | None = None
    adds: bool = False
    received: ReceivedRows | None = None
    shows: np.ndarray | None = None
    clicks: np.ndarray | None = None

    @property
    def bytes(self) -> int:
        scores = sum(x.nbytes for x in (self.shows, self.clicks) if x is not None)
        return self.keys.nbytes + self.grads.nbytes + scores + _PER_PUSH


@dataclass(frozen=True)
class Progress:
    """What a checkpoint includes.

    Attributes:
        number: number of the checkpoint: the last step, if trainers wait for each other, otherwise
            the number of steps of all trainers.
        steps: the last step of each trainer.
        kinds: the same for parameters ('') and each table, where they may differ. If trainers wait
            for each other, the last step of each block (''), and that of each table by 0, in the
            middle of a step.
    """

    number: int
    steps: Mapping[int, int]
    kinds: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


class Scheduler(Protocol):
    """Received gradients, and the steps that are applied.

    A server has one of the two: `SyncScheduler`, whose steps wait for the gradients of all
    trainers, or `AsyncScheduler`, which applies each trainer's on arrival. A method with a body
    concerns only one of them.

    A step number counts from 0; -1 is before the first, and without a state.

    Attributes:
        duplicates: gradients that were ignored, since they came twice or too late.
        left: trainers that are not waited for.
    """

    duplicates: int
    left: set[int]

    @property
    def applied(self) -> int:
        """The last step that is applied for all trainers."""
        ...

    @property
    def step(self) -> int:
        """The current or next step."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether a block or a table was handed out and is not done."""
        ...

    @property
    def queued_bytes(self) -> int:
        """Memory of the dense gradients that are not applied."""
        ...

    @property
    def queued_row_bytes(self) -> int:
        """Memory of the pushes to tables that are not applied."""
        ...

    # Progress, and its recovery.

    @property
    def number(self) -> int:
        """The number of a checkpoint written now; only `restart` and `resume` decrease it."""
        ...

    def progress(self) -> Progress:
        """Returns what a checkpoint written now includes."""
        ...

    @property
    def row_step(self) -> int:
        """The step number of the next table update; it decreases as `number` does."""
        return self.number + 1

    def step_of(self, trainer: int) -> int:
        """Returns the last step applied for a trainer."""
        ...

    def restart(self, step: int) -> None:
        """Sets the applied step; discards inputs of earlier steps."""

    def rewind(self, step: int) -> None:
        """Sets the applied step of another state; discards all inputs, which are not of it."""

    def resume(self, progress: Progress) -> None:
        """Resumes from a checkpoint."""

    # Other trainers.

    @property
    def is_drained(self) -> bool:
        """Whether all complete gradients that came are applied, of trainers that do not wait."""
        return True

    def unbind(self) -> None:
        """Lets no trainer wait for another any more, until there are other trainers."""
        ...

    def renumber(self, former: Mapping[int, int | None]) -> None:
        """Takes other trainers, by their former numbers, if trainers do not wait."""
        del former

    # Arrival of gradients.

    def push(self, step: int, trainer: int, tensors: Iterable[Tensor], rows: int = 0) -> None:
        """Takes a trainer's gradients of a step; duplicates and late ones are ignored.

        `rows` are those of the trainer's batch; 0 if unknown.
        """

    def idle(self, step: int, trainer: int) -> None:
        """Takes a step without gradients: it is applied after the trainer's earlier ones."""
        del step, trainer

    def forget_parts_of(self, trainer: int) -> None:
        """Discards what a former process of a trainer sent of a step, if it is incomplete."""
        del trainer

    def push_rows(self, table: str, push: RowPush) -> None:
        """Takes a trainer's push to a table."""

    def take_parts(self, step: int, tensors: Iterable[Tensor]) -> None:
        """Takes partial sums of other servers."""
        del step, tensors

    def follow(self, step: int) -> None:
        """Records a request for the results of a step."""
        del step

    def follows(self, trainer: int, after: int, table: str = "") -> bool:
        """Whether a push may be taken: the one before it, of step `after`, need not be resent."""
        del trainer, after, table
        return True

    def is_queued(self, trainer: int) -> bool:
        """Whether an update of a trainer is received but not applied."""
        del trainer
        return False

    def missing(self, *, step: int, pulls: bool) -> dict[str, list[str]]:
        """Returns the peers that delay a request, with what is missing of each."""
        ...

    def other_rows(self, step: int, trainer: int, rows: int) -> str | None:
        """Describes batches whose different numbers of rows make a sum inconsistent."""
        del step, trainer, rows
        return None

    # Updates.

    def settle(self) -> None:
        """Applies the steps without gradients that are due."""
        ...

    def hand_out(self) -> list[tuple[BlockPlan, SentGradients]]:
        """Returns the blocks that can run, in order, with their gradients."""
        ...

    def hand_out_tables(self) -> list[tuple[str, Sequence[RowPush]]]:
        """Returns the tables that can be updated, with their pushes."""
        ...

    def ran(self, block: BlockPlan) -> bool:
        """Records that a block ran; returns whether a step is complete."""
        ...

    def table_ran(self, table: str) -> bool:
        """Records that a table was updated; returns whether a step is complete."""
        ...

    def take_back(self, table: str, step: int) -> None:
        """Records that an update failed for a table, which is unchanged."""

    # Values that trainers request.

    def has_applied(self, step: int, trainer: int) -> bool:
        """Whether a trainer's step is applied."""
        ...

    def has_made(
        self, maker: int | None, step: int, trainer: int, until: int | None = None
    ) -> bool:
        """Whether a block's result may be sent to a trainer after one of its steps.

        `until` is the last step after which the trainer uses it; None for `step` itself. Without a
        `maker`, no block produces the value.
        """
        ...

    def is_past(self, maker: int, step: int, *, is_kept: bool) -> bool:
        """Whether a block's result of a step is discarded; a kept one stays until a rerun ends."""
        del maker, step, is_kept
        return False

    def may_look_up(self, table: str, step: int) -> bool:
        """Whether rows of a table may be sent to a trainer at a step."""
        ...

    def has_updated(self, table: str, step: int) -> bool:
        """Whether the update of a table has begun for a step at which all trainers push to it."""
        del table, step
        return False

    def rows_of(self, trainer: int) -> int | None:
        """Returns the last step of which all pushes of a trainer to tables came, if all push."""
        del trainer
        return None

    def stamp(self) -> dict[str, Plain]:
        """Returns the metadata of sent values."""
        return {}

    def gave(self, trainer: int, values: Iterable[tuple[str, np.ndarray | None]]) -> None:
        """Records the values sent to a trainer."""
        del trainer, values

    def gave_rows(self, table: str, trainer: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """Records the rows sent to a trainer."""
        del table, trainer, keys, rows

    def received_rows(self, table: str, trainer: int, keys: np.ndarray) -> ReceivedRows | None:
        """Returns the rows that a trainer received, if gradients are compensated."""
        del table, trainer, keys
        return None

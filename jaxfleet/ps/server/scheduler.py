"""Protocol of the schedulers, which decide when a server's blocks and tables are updated.

A server has one of the two: `SyncScheduler`, whose steps wait for the gradients of all trainers, or
`AsyncScheduler`, which applies each trainer's on arrival.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxfleet.ps.server.execution_plan import BlockPlan
from jaxfleet.ps.server.row_schedulers import RowPush
from jaxfleet.ps.server.sparse_update import SentGradients
from jaxfleet.ps.server.staleness import ReceivedRows
from jaxfleet.transport.messages import Plain, Tensor


class RowQueue(Protocol):
    """Pushes to tables that are not applied yet."""

    @property
    def duplicates(self) -> int: ...

    @property
    def queued_bytes(self) -> int: ...

    def take_back(self, table: str, step: int) -> None:
        """Records that an update failed for a table, which is unchanged."""


class Scheduler(Protocol):
    """Received gradients, and the steps that are applied.

    A step number counts from 0; -1 is before the first, and without a state.

    Attributes:
        duplicates: dense gradients that were ignored, since they came twice or too late.
    """

    duplicates: int

    @property
    def applied(self) -> int:
        """The last step that is applied for all trainers."""
        ...

    @property
    def step(self) -> int:
        """The current or next step."""
        ...

    @property
    def number(self) -> int:
        """The number of a checkpoint written now; only `restart` and `resume` decrease it."""
        ...

    @property
    def row_step(self) -> int:
        """The step number of the next table update; it decreases as `number` does."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether a block or a table was handed out and is not done."""
        ...

    @property
    def left(self) -> set[int]:
        """Trainers that are not waited for."""
        ...

    @property
    def queued_bytes(self) -> int:
        """Memory of the dense gradients that are not applied."""
        ...

    @property
    def tables(self) -> RowQueue:
        """Pushes to tables that are not applied."""
        ...

    # Progress, and its recovery.

    def step_of(self, trainer: int) -> int:
        """Returns the last step applied for a trainer."""
        ...

    def steps(self) -> dict[int, int]:
        """Returns the last step applied for each trainer."""
        ...

    def kinds(self) -> dict[str, dict[int, int]]:
        """Returns the last applied steps of parameters and of each table, where they may differ."""
        ...

    def restart(self, step: int) -> None:
        """Sets the applied step; discards inputs of earlier steps."""

    def resume(
        self, number: int, steps: Mapping[int, int], kinds: Mapping[str, Mapping[int, int]]
    ) -> None:
        """Resumes from a checkpoint's `number`, `steps()` and `kinds()`."""

    # Arrival of gradients.

    def push(self, step: int, trainer: int, tensors: Iterable[Tensor], rows: int = 0) -> None:
        """Takes a trainer's gradients of a step; duplicates and late ones are ignored.

        `rows` are those of the trainer's batch; 0 if unknown.
        """

    def push_rows(self, table: str, push: RowPush) -> None:
        """Takes a trainer's push to a table."""

    def take_parts(self, step: int, tensors: Iterable[Tensor]) -> None:
        """Takes partial sums of other servers."""

    def follow(self, step: int) -> None:
        """Records a request for the results of a step."""

    def follows(self, trainer: int, after: int, table: str = "") -> bool:
        """Whether a push may be taken: the one before it, of step `after`, need not be resent."""
        ...

    def is_queued(self, trainer: int) -> bool:
        """Whether an update of a trainer is received but not applied."""
        ...

    def missing(self, *, step: int, pulls: bool) -> dict[str, list[str]]:
        """Returns the peers that delay a request, with what is missing of each."""
        ...

    def other_rows(self, step: int, trainer: int, rows: int) -> str | None:
        """Describes batches whose different numbers of rows make a sum inconsistent."""
        ...

    # Updates.

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
        ...

    def may_look_up(self, table: str, step: int) -> bool:
        """Whether rows of a table may be sent to a trainer at a step."""
        ...

    def stamp(self) -> dict[str, Plain]:
        """Returns the metadata of sent values."""
        ...

    def gave(self, trainer: int, values: Iterable[tuple[str, np.ndarray | None]]) -> None:
        """Records the values sent to a trainer."""

    def gave_rows(self, table: str, trainer: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """Records the rows sent to a trainer."""

    def received_rows(self, table: str, trainer: int, keys: np.ndarray) -> ReceivedRows | None:
        """Returns the rows that a trainer received, if gradients are compensated."""
        ...

"""Follows one step after another: which gradients came, which blocks may run, which ran."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.messages import Plain, Tensor
from jaxfleet.ps.server.plan import BlockPlan, Merge, ServerPlan
from jaxfleet.ps.server.row_blocks import Sent
from jaxfleet.ps.server.summands import Summands
from jaxfleet.ps.server.table_progress import RowPush, TableProgress


@dataclass
class Progress:
    """Where a server is in its steps.

    Attributes:
        plan: its program.
        applied: the last step whose blocks all ran; -1 without a state.
        wanted: the greatest step that anybody asked for; a server that gets no gradients goes by
            it.
        handed: by block, the last step for which it was handed to the machine.
        done: by block, the last step for which it ran.
        duplicates: arrays that came again, or too late.
        left: trainers that are not waited for: their summands are zeros.
        summands: what came for its blocks.
        tables: what came for its tables.
    """

    plan: ServerPlan
    applied: int = -1
    wanted: int = -1
    handed: dict[int, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    duplicates: int = 0
    left: set[int] = field(default_factory=set)
    summands: Summands = field(init=False)
    tables: TableProgress = field(init=False)
    _begun: dict[int, int] = field(default_factory=dict)  # by trainer, the last step it pushed in

    def __post_init__(self) -> None:
        names = [table.name for table in self.plan.tables]
        self.tables = TableProgress(names, self.plan.trainers, self.left)
        self.summands = Summands(self.plan, self.left)

    @property
    def queued_bytes(self) -> int:
        """What waits for blocks."""
        return self.summands.queued_bytes

    @property
    def step(self) -> int:
        """The step that is under way, or comes next."""
        return self.applied + 1

    @property
    def row_step(self) -> int:
        """The step that tables count what is applied to them next by."""
        return self.step

    @property
    def number(self) -> int:
        """What a checkpoint goes by."""
        return self.applied

    def steps(self) -> dict[int, int]:
        """Returns the last step of each trainer that is applied: the same of all."""
        return dict.fromkeys(range(self.plan.trainers), self.applied)

    def step_of(self, trainer: int) -> int:
        """Returns the last of a trainer's steps that is applied."""
        del trainer
        return self.applied

    def kinds(self) -> dict[str, dict[int, int]]:
        """Returns nothing: parameters and tables are of one step."""
        return {}

    def resume(
        self, number: int, steps: Mapping[int, int], kinds: Mapping[str, Mapping[int, int]]
    ) -> None:
        """Goes on from a checkpoint."""
        del steps, kinds
        self.restart(number)

    def restart(self, step: int) -> None:
        """Takes a step as applied, whatever was before; forgets what waits for others."""
        self.applied = step
        self.handed = {block.index: step for block in self.plan.blocks}
        self.done = dict(self.handed)
        # What is there of later steps came after this state, from who was faster to send it again.
        self.summands.restart(step)
        self._begun = {trainer: later for trainer, later in self._begun.items() if later > step}
        self.tables.restart(step)

    def push(self, step: int, trainer: int, tensors: Iterable[Tensor], rows: int = 0) -> None:
        """Takes gradients; those that came before, or too late, change nothing.

        Args:
            step: theirs.
            trainer: whose they are.
            tensors: they.
            rows: the whole batch's, where the trainer says how many.
        """
        self._note(trainer, step)
        for tensor in tensors:
            block = self._block_of(tensor.name)
            is_late = step <= self.handed.get(block.index, -1)
            if is_late or not self.summands.add(step, trainer, tensor):
                self.duplicates += 1
            elif rows:
                self.summands.note_rows(step, trainer, rows)

    def push_rows(self, table: str, push: RowPush) -> None:
        """Takes gradients of rows; those that came before, or too late, change nothing."""
        self._note(push.request.trainer, push.request.step)
        self.tables.push(table, push)

    def _note(self, trainer: int, step: int) -> None:
        """Notes that a trainer is there, and at a step."""
        self.left.discard(trainer)
        self._begun[trainer] = max(step, self._begun.get(trainer, -1))

    def take_parts(self, step: int, tensors: Iterable[Tensor]) -> None:
        """Takes what another server sent for a step."""
        if step > self.applied:
            self.duplicates += self.summands.add_parts(step, tensors)

    def hand_out(self) -> list[tuple[BlockPlan, Sent]]:
        """Returns the blocks that may run now, in order, with what was sent for them."""
        if self.applied < 0 or not self._starts():
            return []
        found = []
        for block in self.plan.blocks:
            if self.handed[block.index] < self.step and self._is_ready(block):
                self.handed[block.index] = self.step
                found.append((block, self.summands.take(self.step, block)))
        return found

    def hand_out_tables(self) -> list[tuple[str, Sequence[RowPush]]]:
        """Returns the tables that the step can be applied to now, with what was pushed to them."""
        return list(self.tables.hand_out(self.step)) if self.applied >= 0 else []

    def ran(self, block: BlockPlan) -> bool:
        """Notes that a block ran; tells whether the step is applied with it."""
        self.done[block.index] = self.step
        return self._ends()

    def table_ran(self, table: str) -> bool:
        """Notes that a table was updated; tells whether the step is applied with it."""
        self.tables.done[table] = self.step
        return self._ends()

    @property
    def is_running(self) -> bool:
        """Tells whether some of a step was handed out, and not all of it ran."""
        handed = (*self.handed.values(), *self.tables.handed.values())
        return any(step > self.applied for step in handed)

    def _ends(self) -> bool:
        """Goes on to the next step where all of this one ran; tells whether it did."""
        if not self.tables.is_done(self.step):
            return False
        if any(self.done[other.index] < self.step for other in self.plan.blocks):
            return False
        self.summands.forget(self.step)
        self.tables.forget(self.step)
        self.applied += 1
        return True

    def follows(self, trainer: int, after: int, table: str = "") -> bool:
        """Returns True: a step waits for all that is pushed for it, in whatever order it comes."""
        del trainer, after, table
        return True

    def is_queued(self, trainer: int) -> bool:
        """Returns False: what is missing of a trainer is what has not arrived."""
        del trainer
        return False

    def follow(self, step: int) -> None:
        """Notes that somebody asks for what a step makes."""
        self.wanted = max(self.wanted, step)
        if not self.plan.blocks and not self.plan.tables and self.applied >= 0:
            self.applied = max(self.applied, step)

    def missing(self, *, step: int, pulls: bool) -> dict[str, list[str]]:
        """Returns who holds a request up, with the names of what did not come.

        Args:
            step: that it is about.
            pulls: it asks for values.
        """
        del pulls
        if step <= self.applied:
            return {}
        found = self.tables.missing(self.step)
        for block in self.plan.blocks:
            if self.handed.get(block.index, -1) >= self.step:
                continue
            for who, name in self.summands.missing(self.step, block):
                found.setdefault(who, []).append(name)
            for trainer in self._behind(block.merges):
                found.setdefault(f"trainer {trainer}", []).append(f"its step {self.step}")
        return found

    def has_made(
        self, maker: int | None, step: int, trainer: int, until: int | None = None
    ) -> bool:
        """Tells whether a block has run for a step; without a block, whether the step is applied.

        Args:
            maker: the block's number.
            step: which.
            trainer: who asks.
            until: the last step that what is asked for is used after.
        """
        del trainer, until
        return (self.applied if maker is None else self.done.get(maker, -1)) >= step

    def is_past(self, maker: int, step: int, *, is_kept: bool) -> bool:
        """Tells whether what a block made for a step is gone: kept until it ran again, or began."""
        return (self.done if is_kept else self.handed).get(maker, -1) > step

    def may_look_up(self, table: str, step: int) -> bool:
        """Tells whether rows of a table may be given to a trainer at a step."""
        return self.tables.has(table, step - 1)

    def has_applied(self, step: int, trainer: int) -> bool:
        """Tells whether a step is applied, for a trainer that asks."""
        del trainer
        return self.applied >= step

    def stamp(self) -> dict[str, Plain]:
        """Returns what goes with values: nothing, since they are of the step that was asked for."""
        return {}

    def gave(self, trainer: int, values: Iterable[tuple[str, np.ndarray | None]]) -> None:
        """Does nothing: all trainers receive the same."""

    def gave_rows(self, table: str, trainer: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """Does nothing: all trainers receive the same."""

    def received_rows(self, table: str, trainer: int, keys: np.ndarray) -> None:
        """Returns nothing: no gradient comes late."""

    def other_rows(self, step: int, trainer: int, rows: int) -> str | None:
        """Says whose batch has another number of rows, if one's has: their sums do not add up."""
        return self.summands.other_rows(step, trainer, rows)

    def _block_of(self, gradient: str) -> BlockPlan:
        return self._blocks[self.plan.makers_of_merges[gradient]]

    @property
    def _blocks(self) -> Mapping[int, BlockPlan]:
        return self.plan.by_index

    def _starts(self) -> bool:
        """Tells whether the step may start: nothing of it runs before some gradient is complete."""
        if any(step == self.step for step in self.handed.values()):
            return True
        if self.tables.has_begun(self.step):
            return True
        if not self.plan.merges and not self.plan.tables:
            return self.wanted >= self.step
        return any(block.merges and self._has_all(block.merges) for block in self.plan.blocks)

    def _is_ready(self, block: BlockPlan) -> bool:
        if any(self.handed[other] < self.step for other in block.after):
            return False
        return self._has_all(block.merges) and (
            not block.exchanges or self.summands.has_parts(self.step)
        )

    def _has_all(self, merges: Sequence[Merge]) -> bool:
        return self.summands.has_all(self.step, merges) and not self._behind(merges)

    def _behind(self, merges: Sequence[Merge]) -> list[int]:
        """Returns who may still ask for what the step before made of what gradients change.

        Who sends a gradient has received all of the step before. Those that send none, as where
        the first trainer's counts for all, say so by any push of this step, an empty one too.
        """
        trainers = range(self.plan.trainers)
        if not merges or any(len(merge.senders) == len(trainers) for merge in merges):
            return []
        here = {t for t in trainers if t in self.left or self._begun.get(t, -1) >= self.step}
        return [trainer for trainer in trainers if trainer not in here]

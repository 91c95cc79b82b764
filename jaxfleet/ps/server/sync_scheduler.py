"""Scheduler of blocks for synchronous steps, which wait for the gradients of all trainers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxfleet.ps.server.execution_plan import BlockPlan, Merge, SentGradients, ServerPlan
from jaxfleet.ps.server.gradient_buffer import GradientBuffer, StepBuffer
from jaxfleet.ps.server.scheduler import Progress, RowPush, Scheduler
from jaxfleet.transport.messages import Tensor

_BLOCKS = ""  # the kind of a progress that is by block; tables have theirs


@dataclass
class SyncScheduler(Scheduler):
    """Progress of a server's steps.

    Attributes:
        applied: the last step whose blocks all ran; -1 without a state.
        wanted: the greatest requested step, which a server without gradients follows.
        handed: by block and table, the last step for which it was started.
        done: by block and table, the last step for which it ran.
        left: trainers that are not waited for: their summands are zeros.
    """

    plan: ServerPlan
    applied: int = -1
    wanted: int = -1
    handed: dict[int | str, int] = field(default_factory=dict)
    done: dict[int | str, int] = field(default_factory=dict)
    duplicates: int = 0
    left: set[int] = field(default_factory=set)
    summands: GradientBuffer = field(init=False)
    rows: StepBuffer[RowPush] = field(init=False)
    _begun: dict[int, int] = field(default_factory=dict)  # by trainer, the last step of a push

    def __post_init__(self) -> None:
        self._tables = [table.name for table in self.plan.tables]
        self._trainers = range(self.plan.trainers)
        self.rows = StepBuffer(lambda push: push.bytes, self.left)
        self.summands = GradientBuffer(self.plan, self.left)

    @property
    def queued_bytes(self) -> int:
        return self.summands.queued_bytes

    @property
    def queued_row_bytes(self) -> int:
        return self.rows.bytes

    @property
    def step(self) -> int:
        return self.applied + 1

    @property
    def number(self) -> int:
        return self.applied

    def progress(self) -> Progress:
        """Returns the steps, and the blocks and tables that have run of an incomplete one."""
        steps = dict.fromkeys(range(self.plan.trainers), self.applied)
        blocks = {unit: step for unit, step in self.done.items() if isinstance(unit, int)}
        tables = {unit: {0: step} for unit, step in self.done.items() if isinstance(unit, str)}
        kinds = {_BLOCKS: blocks, **tables} if self.is_running else {}
        return Progress(self.applied, steps, kinds)

    def resume(self, progress: Progress) -> None:
        self.restart(progress.number)
        for kind, done in progress.kinds.items():
            if kind == _BLOCKS:
                self.done.update(done.items())
            else:
                self.done[kind] = done[0]
        self.handed = dict(self.done)

    def step_of(self, trainer: int) -> int:
        del trainer
        return self.applied

    def restart(self, step: int) -> None:
        self.applied = step
        units: list[int | str] = [*(block.index for block in self.plan.blocks), *self._tables]
        self.handed = dict.fromkeys(units, step)
        self.done = dict(self.handed)
        # Inputs of later steps were sent after this state, by trainers that recovered sooner.
        self.summands.restart(step)
        self._begun = {trainer: later for trainer, later in self._begun.items() if later > step}
        self.rows.restart(step)

    def rewind(self, step: int) -> None:
        self.summands.clear()
        self.rows.clear()
        self._begun.clear()
        self.restart(step)

    def unbind(self) -> None:
        """Does nothing: a step needs the gradients of all trainers."""

    def take_over(self, other: "SyncScheduler") -> None:
        """Goes on where the scheduler of the same blocks for other trainers stopped.

        Blocks and tables that have run for the current step do not run again.
        """
        self.applied, self.wanted = other.applied, other.wanted
        self.handed, self.done = dict(other.done), dict(other.done)
        self.duplicates = other.duplicates
        self.summands.take_over(other.summands)

    def push(self, step: int, trainer: int, tensors: Iterable[Tensor], rows: int = 0) -> None:
        self._note(trainer, step)
        for tensor in tensors:
            block = self._block_of(tensor.name)
            is_late = step <= self.handed.get(block.index, -1)
            if is_late or not self.summands.add(step, trainer, tensor):
                self.duplicates += 1
            elif rows:
                self.summands.note_rows(step, trainer, rows)

    def push_rows(self, table: str, push: RowPush) -> None:
        step, trainer = push.request.step, push.request.trainer
        self._note(trainer, step)
        is_late = step <= self.handed.get(table, -1)
        if is_late or not self.rows.add(step, table, trainer, push):
            self.duplicates += 1

    def _note(self, trainer: int, step: int) -> None:
        """Records that a trainer is present and at a step."""
        self.left.discard(trainer)
        self._begun[trainer] = max(step, self._begun.get(trainer, -1))

    def take_parts(self, step: int, tensors: Iterable[Tensor]) -> None:
        if step > self.applied:
            self.duplicates += self.summands.add_parts(step, tensors)

    def hand_out(self) -> list[tuple[BlockPlan, SentGradients]]:
        if self.applied < 0 or not self._starts():
            return []
        found = []
        for block in self.plan.blocks:
            if self.handed[block.index] < self.step and self._is_ready(block):
                self.handed[block.index] = self.step
                found.append((block, self.summands.take(self.step, block)))
        return found

    def hand_out_tables(self) -> list[tuple[str, Sequence[RowPush]]]:
        found: list[tuple[str, Sequence[RowPush]]] = []
        for table in self._tables if self.applied >= 0 else ():
            if self.handed[table] < self.step and self._has_rows(table):
                self.handed[table] = self.step
                pushes = self.rows.take(self.step, table)
                found.append((table, [pushes[trainer] for trainer in sorted(pushes)]))
        return found

    def ran(self, block: BlockPlan) -> bool:
        self.done[block.index] = self.step
        return self._ends()

    def table_ran(self, table: str) -> bool:
        self.done[table] = self.step
        return self._ends()

    def take_back(self, table: str, step: int) -> None:
        self.handed[table] = step - 1

    @property
    def is_running(self) -> bool:
        return any(step > self.applied for step in self.handed.values())

    def _ends(self) -> bool:
        """Advances to the next step if this one is complete; returns whether it is."""
        if any(step < self.step for step in self.done.values()):
            return False
        self.summands.forget(self.step)
        self.rows.forget(self.step)
        self.applied += 1
        return True

    def settle(self) -> None:
        """Does nothing: every step has gradients."""

    def follow(self, step: int) -> None:
        self.wanted = max(self.wanted, step)
        if not self.plan.blocks and not self.plan.tables and self.applied >= 0:
            self.applied = max(self.applied, step)

    def missing(self, *, step: int, pulls: bool) -> dict[str, list[str]]:
        del pulls
        if step <= self.applied:
            return {}
        found: dict[str, list[str]] = {}
        for table in self._tables:
            if self.handed.get(table, -1) < self.step:
                for trainer in self.rows.missing(self.step, table, self._trainers):
                    found.setdefault(f"trainer {trainer}", []).append(f"rows of '{table}'")
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
        del trainer, until
        return (self.applied if maker is None else self.done.get(maker, -1)) >= step

    def is_past(self, maker: int, step: int, *, is_kept: bool) -> bool:
        return (self.done if is_kept else self.handed).get(maker, -1) > step

    def may_look_up(self, table: str, step: int) -> bool:
        return self.done.get(table, -1) >= step - 1

    def has_updated(self, table: str, step: int) -> bool:
        return self.handed.get(table, -1) >= step

    def rows_of(self, trainer: int) -> int | None:
        def newest(table: str) -> int:
            handed = self.handed[table]
            is_here = trainer not in self.rows.missing(handed + 1, table, [trainer])
            return handed + is_here

        return min(map(newest, self._tables)) if self._tables and self.applied >= 0 else None

    def has_applied(self, step: int, trainer: int) -> bool:
        del trainer
        return self.applied >= step

    def other_rows(self, step: int, trainer: int, rows: int) -> str | None:
        return self.summands.other_rows(step, trainer, rows)

    def _block_of(self, gradient: str) -> BlockPlan:
        return self.plan.by_index[self.plan.makers_of_merges[gradient]]

    def _starts(self) -> bool:
        """Whether the step may start: nothing runs before some gradient is complete."""
        if any(step == self.step for step in self.handed.values()):
            return True
        if any(self._has_rows(table) for table in self._tables):
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

    def _has_rows(self, table: str) -> bool:
        return self.rows.has_all(self.step, table, self._trainers)

    def _has_all(self, merges: Sequence[Merge]) -> bool:
        return self.summands.has_all(self.step, merges) and not self._behind(merges)

    def _behind(self, merges: Sequence[Merge]) -> list[int]:
        """Returns the trainers that may still request results that these gradients change.

        A sender of a gradient has received all results of the previous step. Trainers that send
        none, as when the first trainer's gradient counts for all, confirm this with any push of
        this step, even an empty one.
        """
        trainers = self._trainers
        if not merges or any(len(merge.senders) == len(trainers) for merge in merges):
            return []
        here = {t for t in trainers if t in self.left or self._begun.get(t, -1) >= self.step}
        return [trainer for trainer in trainers if trainer not in here]

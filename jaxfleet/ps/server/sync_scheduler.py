"""Scheduler of blocks for synchronous steps, which wait for the gradients of all trainers."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from jaxfleet.ps.server.execution_plan import BlockPlan, Merge, SentGradients, ServerPlan
from jaxfleet.ps.server.gradient_buffer import GradientBuffer
from jaxfleet.ps.server.scheduler import Progress, RowPush, Scheduler
from jaxfleet.transport.messages import Tensor

Pushes = Mapping[int, RowPush]


@dataclass
class SyncRowScheduler:
    """Progress of a server's tables. Every trainer pushes to every table at every step.

    Attributes:
        done: by table, the last applied step.
        handed: by table, the last started step.
    """

    tables: Collection[str]
    trainers: int
    left: AbstractSet[int]
    done: dict[str, int] = field(default_factory=dict)
    handed: dict[str, int] = field(default_factory=dict)
    queued_bytes: int = 0
    duplicates: int = 0
    _pushed: dict[int, dict[str, dict[int, RowPush]]] = field(default_factory=dict)

    def restart(self, step: int) -> None:
        """Sets the applied step; pushes of later steps are kept."""
        self.done = dict.fromkeys(self.tables, step)
        self.handed = dict(self.done)
        self._pushed = {later: pushes for later, pushes in self._pushed.items() if later > step}
        self.queued_bytes = sum(push.bytes for push in self._waiting())

    def push(self, table: str, push: RowPush) -> None:
        """Queues a push; duplicates and late pushes are ignored."""
        step = push.request.step
        trainer = push.request.trainer
        if step <= self.handed.get(table, -1) or trainer in self._of(table, step):
            self.duplicates += 1
            return
        self._pushed.setdefault(step, {}).setdefault(table, {})[trainer] = push
        self.queued_bytes += push.bytes

    def hand_out(self, step: int) -> Iterator[tuple[str, Sequence[RowPush]]]:
        """Yields the tables that can apply a step, with its pushes in the trainers' order."""
        for table in self.tables:
            if self.handed.get(table, -1) < step and self._has_all(table, step):
                pushes = self._pushed[step].pop(table)
                self.handed[table] = step
                self.queued_bytes -= sum(push.bytes for push in pushes.values())
                yield table, [pushes[trainer] for trainer in sorted(pushes)]

    def take_back(self, table: str, step: int) -> None:
        """Records that a step failed for a table, which is unchanged."""
        self.handed[table] = step - 1

    def has(self, table: str, step: int) -> bool:
        return self.done.get(table, -1) >= step

    def has_begun(self, step: int) -> bool:
        """Whether a step has started or can start for some table."""
        handed = any(self.handed.get(table, -1) >= step for table in self.tables)
        return handed or any(self._has_all(table, step) for table in self.tables)

    def is_done(self, step: int) -> bool:
        return all(self.has(table, step) for table in self.tables)

    def forget(self, step: int) -> None:
        self._pushed.pop(step, None)

    def missing(self, step: int) -> dict[str, list[str]]:
        """Returns the trainers that delay a step, with the tables that they have not pushed to."""
        found: dict[str, list[str]] = {}
        for table in self.tables:
            if self.handed.get(table, -1) < step:
                for trainer in self._awaited() - self._of(table, step).keys():
                    found.setdefault(f"trainer {trainer}", []).append(f"rows of '{table}'")
        return found

    def _has_all(self, table: str, step: int) -> bool:
        """Whether all awaited trainers have pushed, and at least one has."""
        came = self._of(table, step)
        return bool(came) and came.keys() >= self._awaited()

    def _of(self, table: str, step: int) -> Pushes:
        return self._pushed.get(step, {}).get(table, {})

    def _awaited(self) -> set[int]:
        return {trainer for trainer in range(self.trainers) if trainer not in self.left}

    def _waiting(self) -> Iterator[RowPush]:
        for tables in self._pushed.values():
            for pushes in tables.values():
                yield from pushes.values()


@dataclass
class SyncScheduler(Scheduler):
    """Progress of a server's steps.

    Attributes:
        applied: the last step whose blocks all ran; -1 without a state.
        wanted: the greatest requested step, which a server without gradients follows.
        handed: by block, the last step for which it was started.
        done: by block, the last step for which it ran.
        left: trainers that are not waited for: their summands are zeros.
    """

    plan: ServerPlan
    applied: int = -1
    wanted: int = -1
    handed: dict[int, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    duplicates: int = 0
    left: set[int] = field(default_factory=set)
    summands: GradientBuffer = field(init=False)
    tables: SyncRowScheduler = field(init=False)
    _begun: dict[int, int] = field(default_factory=dict)  # by trainer, the last step of a push

    def __post_init__(self) -> None:
        names = [table.name for table in self.plan.tables]
        self.tables = SyncRowScheduler(names, self.plan.trainers, self.left)
        self.summands = GradientBuffer(self.plan, self.left)

    @property
    def queued_bytes(self) -> int:
        return self.summands.queued_bytes

    @property
    def step(self) -> int:
        return self.applied + 1

    @property
    def number(self) -> int:
        return self.applied

    def progress(self) -> Progress:
        return Progress(self.applied, dict.fromkeys(range(self.plan.trainers), self.applied))

    def resume(self, progress: Progress) -> None:
        self.restart(progress.number)

    def step_of(self, trainer: int) -> int:
        del trainer
        return self.applied

    def restart(self, step: int) -> None:
        self.applied = step
        self.handed = {block.index: step for block in self.plan.blocks}
        self.done = dict(self.handed)
        # Inputs of later steps were sent after this state, by trainers that recovered sooner.
        self.summands.restart(step)
        self._begun = {trainer: later for trainer, later in self._begun.items() if later > step}
        self.tables.restart(step)

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
        self._note(push.request.trainer, push.request.step)
        self.tables.push(table, push)

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
        return list(self.tables.hand_out(self.step)) if self.applied >= 0 else []

    def ran(self, block: BlockPlan) -> bool:
        self.done[block.index] = self.step
        return self._ends()

    def table_ran(self, table: str) -> bool:
        self.tables.done[table] = self.step
        return self._ends()

    @property
    def is_running(self) -> bool:
        handed = (*self.handed.values(), *self.tables.handed.values())
        return any(step > self.applied for step in handed)

    def _ends(self) -> bool:
        """Advances to the next step if this one is complete; returns whether it is."""
        if not self.tables.is_done(self.step):
            return False
        if any(self.done[other.index] < self.step for other in self.plan.blocks):
            return False
        self.summands.forget(self.step)
        self.tables.forget(self.step)
        self.applied += 1
        return True

    def follow(self, step: int) -> None:
        self.wanted = max(self.wanted, step)
        if not self.plan.blocks and not self.plan.tables and self.applied >= 0:
            self.applied = max(self.applied, step)

    def missing(self, *, step: int, pulls: bool) -> dict[str, list[str]]:
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
        del trainer, until
        return (self.applied if maker is None else self.done.get(maker, -1)) >= step

    def is_past(self, maker: int, step: int, *, is_kept: bool) -> bool:
        return (self.done if is_kept else self.handed).get(maker, -1) > step

    def may_look_up(self, table: str, step: int) -> bool:
        return self.tables.has(table, step - 1)

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
        """Returns the trainers that may still request results that these gradients change.

        A sender of a gradient has received all results of the previous step. Trainers that send
        none, as when the first trainer's gradient counts for all, confirm this with any push of
        this step, even an empty one.
        """
        trainers = range(self.plan.trainers)
        if not merges or any(len(merge.senders) == len(trainers) for merge in merges):
            return []
        here = {t for t in trainers if t in self.left or self._begun.get(t, -1) >= self.step}
        return [trainer for trainer in trainers if trainer not in here]

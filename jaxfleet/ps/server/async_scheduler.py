"""Scheduler of blocks for asynchronous trainers, whose updates are applied on arrival.

An update is the set of gradients of one step of one trainer. It is applied once it is complete, in
the order of completion, and each runs all blocks.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.gradient_encoding import RowGradient, gradient_of
from jaxfleet.ps.server.execution_plan import BlockPlan, SentGradients, ServerPlan
from jaxfleet.ps.server.scheduler import Progress, RowPush, Scheduler
from jaxfleet.ps.server.staleness import UNBOUNDED, ReceivedRows, RowSnapshots, TrainerClocks
from jaxfleet.transport.messages import Plain, Tensor

_DENSE = ""  # kind of dense gradients; the other kinds are table names


@dataclass
class TrainerUpdate:
    """The gradients of one step of a trainer, or of several merged ones, of which it is the last.

    The blocks that are `left` have not run for it. An idle one has no gradients: its trainer had
    no samples, and only advances its clock.
    """

    trainer: int
    step: int
    arrays: dict[str, np.ndarray | RowGradient] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    is_idle: bool = False

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


@dataclass
class AsyncRowScheduler:
    """Pushes to a server's tables, applied in order of arrival.

    `applied` is called with the table, trainer and step of each applied push.
    """

    applied: Callable[[str, int, int], None]
    _waiting: deque[tuple[str, RowPush]] = field(default_factory=deque)
    _running: dict[str, deque[RowPush]] = field(default_factory=dict)
    _newest: dict[tuple[str, int], int] = field(default_factory=dict)  # by table and trainer
    _seen: dict[tuple[str, int], int] = field(default_factory=dict)  # includes rejected pushes

    @property
    def queued_bytes(self) -> int:
        return sum(push.bytes for _, push in self._waiting)

    @property
    def is_under_way(self) -> bool:
        return any(self._running.values())

    @property
    def is_empty(self) -> bool:
        return not (self._waiting or self.is_under_way)

    def restart(self) -> None:
        self._waiting.clear()
        self._newest.clear()
        self._seen.clear()

    def seen(self, table: str, trainer: int) -> int:
        """Returns a trainer's last received step for a table since the restart."""
        return self._seen.get((table, trainer), -1)

    def push(self, table: str, push: RowPush, *, done: int) -> bool:
        """Queues a push; returns False for a duplicate, which is ignored."""
        step, known = push.request.step, (table, push.request.trainer)
        if step <= max(done, self._newest.get(known, -1)):
            return False
        self._newest[known] = self._seen[known] = step
        self._waiting.append((table, push))
        return True

    def hand_out(self) -> list[tuple[str, Sequence[RowPush]]]:
        found: list[tuple[str, Sequence[RowPush]]] = []
        while self._waiting:
            table, push = self._waiting.popleft()
            self._running.setdefault(table, deque()).append(push)
            found.append((table, [push]))
        return found

    def ran(self, table: str) -> None:
        push = self._running[table].popleft()
        self.applied(table, push.request.trainer, push.request.step)

    def take_back(self, table: str) -> None:
        push = self._running[table].popleft()
        self._newest[table, push.request.trainer] = push.request.step - 1


@dataclass
class AsyncScheduler(Scheduler):
    """Received and applied updates of all trainers.

    Attributes:
        host: current values; views of them stay unchanged.
        clocks: applied steps of each trainer, over all kinds.
        copies: rows that trainers received of the tables.
    """

    plan: ServerPlan
    host: Mapping[str, np.ndarray]
    clocks: TrainerClocks = field(init=False)
    duplicates: int = 0
    left: set[int] = field(init=False)
    tables: AsyncRowScheduler = field(init=False)
    copies: RowSnapshots = field(init=False)
    _kinds: list[str] = field(init=False)  # kinds of gradients that a trainer sends at a step
    _done: dict[tuple[str, int], int] = field(default_factory=dict)  # by kind and trainer
    _partial: dict[int, TrainerUpdate] = field(default_factory=dict)  # by trainer
    _whole: deque[TrainerUpdate] = field(default_factory=deque)
    _running: TrainerUpdate | None = None
    _received: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clocks = TrainerClocks(self.plan.trainers, self.plan.staleness)
        self.left = self.clocks.left
        self.tables = AsyncRowScheduler(self._has_applied)
        self.copies = RowSnapshots(self.plan.compensation != 0.0)
        self._kinds = [*([_DENSE] if self.plan.merges else []), *(t.name for t in self.plan.tables)]

    @property
    def applied(self) -> int:
        return self.clocks.least()

    @property
    def step(self) -> int:
        return self._running.step if self._running is not None else self.applied + 1

    @property
    def queued_bytes(self) -> int:
        return sum(update.bytes for update in (*self._whole, *self._partial.values()))

    @property
    def queued_row_bytes(self) -> int:
        return self.tables.queued_bytes

    @property
    def is_running(self) -> bool:
        return self._running is not None or self.tables.is_under_way

    def restart(self, step: int) -> None:
        self.clocks.restart(step)
        self._forget()

    def unbind(self) -> None:
        """Lets no trainer wait for another any more."""
        self.clocks.bound = UNBOUNDED

    @property
    def is_drained(self) -> bool:
        """Whether all complete gradients that came are applied."""
        return not self._whole and self._running is None and self.tables.is_empty

    def renumber(self, former: Mapping[int, int | None]) -> None:
        """Takes other trainers, as `TrainerClocks.renumber`; what is incomplete is discarded."""
        self.clocks.renumber(former)
        self.left = self.clocks.left
        self._forget()

    def take_over(self, other: "AsyncScheduler") -> None:
        """Goes on where the scheduler of the same blocks stopped, with the same trainers."""
        self.clocks.applied = dict(other.clocks.applied)
        self.duplicates = other.duplicates
        self._forget()

    def rewind(self, step: int) -> None:
        self.restart(step)

    @property
    def number(self) -> int:
        return self.clocks.total()

    def progress(self) -> Progress:
        trainers = range(self.plan.trainers)
        kinds = {kind: {t: self._done[kind, t] for t in trainers} for kind in self._kinds}
        return Progress(self.number, dict(self.clocks.applied), kinds)

    def resume(self, progress: Progress) -> None:
        """Resumes; tables may include later steps than parameters, which are not applied again."""
        self.clocks.applied = dict(progress.steps)
        self._forget()
        for kind, done in progress.kinds.items():
            self._done.update(((kind, trainer), step) for trainer, step in done.items())

    def _forget(self) -> None:
        self._partial.clear()
        self._whole.clear()
        self._received.clear()
        self._done = {
            (kind, trainer): step
            for kind in self._kinds
            for trainer, step in self.clocks.applied.items()
        }
        self.tables.restart()
        self.copies.restart()

    def step_of(self, trainer: int) -> int:
        return self.clocks.of(trainer)

    def push(self, step: int, trainer: int, tensors: Iterable[Tensor], rows: int = 0) -> None:
        del rows  # batch sizes may differ
        self.left.discard(trainer)
        found = self._partial.get(trainer)
        if found is None or found.step < step:
            found = self._partial[trainer] = TrainerUpdate(trainer, step)
        late = step <= self._newest(trainer) or step < found.step
        for tensor in tensors:
            if late or tensor.name in found.arrays:
                self.duplicates += 1
            else:
                found.arrays[tensor.name] = gradient_of(tensor)
        if not found.arrays:
            del self._partial[trainer]
        elif found.arrays.keys() >= self.plan.merges.keys():
            self._whole.append(self._partial.pop(trainer))

    def idle(self, step: int, trainer: int) -> None:
        self.left.discard(trainer)
        if step <= min((self._here(kind, trainer) for kind in self._kinds), default=-1):
            self.duplicates += 1
            return
        self._partial.pop(trainer, None)
        self._whole.append(TrainerUpdate(trainer, step, is_idle=True))

    def forget_parts_of(self, trainer: int) -> None:
        self._partial.pop(trainer, None)

    def settle(self) -> None:
        while self._whole and self._whole[0].is_idle and self.applied >= 0:
            if self._running is not None or not self.tables.is_empty:
                return  # gradients that came before are applied before
            update = self._whole.popleft()
            for kind in self._kinds:
                self._has_applied(kind, update.trainer, update.step)

    def _under_way(self, trainer: int) -> list[TrainerUpdate]:
        """Returns the complete updates of a trainer that are not applied."""
        updates = (*self._whole, *((self._running,) if self._running is not None else ()))
        return [update for update in updates if update.trainer == trainer]

    def _newest(self, trainer: int) -> int:
        """Returns the last complete step of a trainer, applied or not."""
        steps = (update.step for update in self._under_way(trainer))
        return max(steps, default=self._done.get((_DENSE, trainer), -1))

    def _here(self, kind: str, trainer: int) -> int:
        """Returns the last step of a kind that came completely from a trainer, applied or not."""
        if kind == _DENSE:
            return self._newest(trainer)
        idle = (update.step for update in self._under_way(trainer) if update.is_idle)
        done = self._done.get((kind, trainer), -1)
        return max(done, self.tables.seen(kind, trainer), *idle)

    def push_rows(self, table: str, push: RowPush) -> None:
        trainer = push.request.trainer
        self.left.discard(trainer)
        if not self.tables.push(table, push, done=self._done.get((table, trainer), -1)):
            self.duplicates += 1

    def hand_out_tables(self) -> list[tuple[str, Sequence[RowPush]]]:
        return self.tables.hand_out() if self.applied >= 0 else []

    def table_ran(self, table: str) -> bool:
        self.tables.ran(table)
        return True

    def take_back(self, table: str, step: int) -> None:
        del step  # tables count by another number
        self.tables.take_back(table)

    def _has_applied(self, kind: str, trainer: int, step: int) -> None:
        """Records an applied step; a trainer's clock is the minimum over its kinds."""
        self._done[kind, trainer] = max(step, self._done.get((kind, trainer), -1))
        self.clocks.advance(trainer, min(self._done[other, trainer] for other in self._kinds))

    def hand_out(self) -> list[tuple[BlockPlan, SentGradients]]:
        if self.applied < 0 or self._running is not None or not self._whole:
            return []
        if self._whole[0].is_idle:  # `settle` applies it
            return []
        update = self._running = self._whole.popleft()
        update.left = {block.index for block in self.plan.blocks}
        return [(block, self._sent(update, block)) for block in self.plan.blocks]

    def _sent(self, update: TrainerUpdate, block: BlockPlan) -> SentGradients:
        names = [merge.name for merge in block.merges]
        sent: dict[str, np.ndarray | RowGradient] = {name: update.arrays[name] for name in names}
        for name, param in block.backups.items():
            received = self._received.get((update.trainer, param))
            sent[name] = self.host[param] if received is None else received
        return sent

    def ran(self, block: BlockPlan) -> bool:
        update = self._running
        assert update is not None
        update.left.discard(block.index)
        if update.left:
            return False
        self._has_applied(_DENSE, update.trainer, update.step)
        self._running = None
        return True

    def follows(self, trainer: int, after: int, table: str = _DENSE) -> bool:
        """Whether the preceding push, that of step `after`, has arrived.

        A lost push is resent; after its successor it would count as late.
        """
        if table == _DENSE and _DENSE not in self._kinds:
            return True  # only idle steps are pushed
        return after <= self._here(table, trainer)

    def is_queued(self, trainer: int) -> bool:
        return self.tables.is_under_way or bool(self._under_way(trainer))

    def has_made(
        self, maker: int | None, step: int, trainer: int, until: int | None = None
    ) -> bool:
        del maker
        return not self._kinds or self.clocks.allow(trainer, step, until)

    def may_look_up(self, table: str, step: int) -> bool:
        del table
        return next(self.clocks.behind(step - 1), None) is None

    def gave_rows(self, table: str, trainer: int, keys: np.ndarray, rows: np.ndarray) -> None:
        self.copies.give(table, trainer, keys, rows)

    def received_rows(self, table: str, trainer: int, keys: np.ndarray) -> ReceivedRows | None:
        return self.copies.of(table, trainer, keys)

    def has_applied(self, step: int, trainer: int) -> bool:
        return not self._kinds or self.clocks.has(trainer, step)

    def stamp(self) -> dict[str, Plain]:
        return {"clock": self.applied} if self._kinds else {}

    def gave(self, trainer: int, values: Iterable[tuple[str, np.ndarray | None]]) -> None:
        for name, value in values:
            if value is not None and name in self.plan.backed_up:
                self._received[trainer, name] = value

    def missing(self, *, step: int, pulls: bool) -> dict[str, list[str]]:
        slow = self.clocks.behind(step) if pulls else self.clocks.before(step)
        least = step - self.clocks.bound if pulls else step
        return {f"trainer {trainer}": [f"its step {least}"] for trainer in slow}

"""Follows trainers that do not wait for each other: what each sends is applied as it comes.

What one trainer sends for one of its steps is an update: it is applied once all of it is here, in
the order in which updates became whole, and each runs all blocks. It has what
`jaxfleet.ps.server.progress` has for steps that wait for all trainers.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.messages import Plain, Tensor
from jaxfleet.ps.row_gradients import RowGradient, taken
from jaxfleet.ps.server.plan import BlockPlan, ServerPlan
from jaxfleet.ps.server.row_arrivals import RowArrivals
from jaxfleet.ps.server.row_blocks import Sent
from jaxfleet.ps.server.row_copies import Received, RowCopies
from jaxfleet.ps.server.staleness import Clocks
from jaxfleet.ps.server.table_progress import RowPush

_DENSE = ""  # what trainers send of parameters, beside the tables by their names


@dataclass
class Update:
    """What a trainer sent for one of its steps, or for several that it merged.

    Attributes:
        trainer: who sent it.
        step: the last that is in it.
        arrays: they, by name.
        left: the numbers of the blocks that did not run for it yet.
    """

    trainer: int
    step: int
    arrays: dict[str, np.ndarray | RowGradient] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        """What waits of it."""
        return sum(array.nbytes for array in self.arrays.values())


@dataclass
class Arrivals:
    """What came of trainers, and what of it was applied.

    Attributes:
        plan: the server's program.
        host: values as they are given out; a view of each stays what it is.
        clocks: how far each trainer is, with all that it sends.
        duplicates: arrays that came again.
        tables: what came for the tables.
        copies: what trainers received of the tables.
    """

    plan: ServerPlan
    host: Mapping[str, np.ndarray]
    clocks: Clocks = field(init=False)
    duplicates: int = 0
    tables: RowArrivals = field(init=False)
    copies: RowCopies = field(init=False)
    _kinds: list[str] = field(init=False)  # of what a trainer sends at a step
    _done: dict[tuple[str, int], int] = field(default_factory=dict)  # by kind and trainer
    _partial: dict[int, Update] = field(default_factory=dict)  # by trainer
    _whole: deque[Update] = field(default_factory=deque)
    _running: Update | None = None
    _received: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clocks = Clocks(self.plan.trainers, self.plan.staleness)
        self.tables = RowArrivals(self._has_applied)
        self.copies = RowCopies(self.plan.compensation != 0.0)
        self._kinds = [*([_DENSE] if self.plan.merges else []), *(t.name for t in self.plan.tables)]

    @property
    def applied(self) -> int:
        """The step until which all trainers' are applied; -1 without a state."""
        return self.clocks.least()

    @property
    def step(self) -> int:
        """The step of the update that runs, or of what comes next."""
        return self._running.step if self._running is not None else self.applied + 1

    @property
    def left(self) -> set[int]:
        """Trainers that are not waited for."""
        return self.clocks.left

    @property
    def queued_bytes(self) -> int:
        """Of what waits to be applied."""
        return sum(update.bytes for update in (*self._whole, *self._partial.values()))

    @property
    def is_running(self) -> bool:
        """Whether an update is under way."""
        return self._running is not None or self.tables.is_under_way

    @property
    def row_step(self) -> int:
        """What tables count by what is applied to them next: it never goes down."""
        return self.number + 1

    @property
    def number(self) -> int:
        """How many steps are applied, of all trainers: what a checkpoint goes by."""
        return self.clocks.total()

    def restart(self, step: int) -> None:
        """Takes a step of all trainers as applied, whatever was before."""
        self.clocks.restart(step)
        self._forget()

    def resume(
        self, number: int, steps: Mapping[int, int], kinds: Mapping[str, Mapping[int, int]]
    ) -> None:
        """Goes on from a checkpoint that holds each trainer's steps until one of its own.

        What it holds of a table may be further than of parameters: that is not applied again.
        """
        del number
        self.clocks.applied = dict(steps)
        self._forget()
        for kind, done in kinds.items():
            self._done.update(((kind, trainer), step) for trainer, step in done.items())

    def kinds(self) -> dict[str, dict[int, int]]:
        """Returns the last step of each trainer that is applied, to parameters and each table."""
        trainers = range(self.plan.trainers)
        return {kind: {t: self._done[kind, t] for t in trainers} for kind in self._kinds}

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

    def steps(self) -> dict[int, int]:
        """Returns the last step of each trainer that is applied."""
        return dict(self.clocks.applied)

    def step_of(self, trainer: int) -> int:
        """Returns the last of a trainer's steps that is applied."""
        return self.clocks.of(trainer)

    def push(self, step: int, trainer: int, tensors: Iterable[Tensor], rows: int = 0) -> None:
        """Takes what a trainer sent for a step; what came before changes nothing."""
        del rows  # each has as many as it likes
        self.left.discard(trainer)
        found = self._partial.get(trainer)
        if found is None or found.step < step:
            found = self._partial[trainer] = Update(trainer, step)
        late = step <= self._newest(trainer) or step < found.step
        for tensor in tensors:
            if late or tensor.name in found.arrays:
                self.duplicates += 1
            else:
                found.arrays[tensor.name] = taken(tensor)
        if not found.arrays:
            del self._partial[trainer]
        elif found.arrays.keys() >= self.plan.merges.keys():
            self._whole.append(self._partial.pop(trainer))

    def _newest(self, trainer: int) -> int:
        """Returns the last step of a trainer that is here as a whole, applied or not."""
        under_way = (*self._whole, *((self._running,) if self._running is not None else ()))
        steps = (update.step for update in under_way if update.trainer == trainer)
        return max(steps, default=self._done.get((_DENSE, trainer), -1))

    def push_rows(self, table: str, push: RowPush) -> None:
        """Takes gradients of rows; what came before changes nothing."""
        trainer = push.request.trainer
        self.left.discard(trainer)
        self.tables.push(table, push, done=self._done.get((table, trainer), -1))

    def hand_out_tables(self) -> list[tuple[str, Sequence[RowPush]]]:
        """Returns the tables with what came for them; each push is applied alone."""
        return self.tables.hand_out() if self.applied >= 0 else []

    def table_ran(self, table: str) -> bool:
        """Notes that a push was applied to a table."""
        self.tables.ran(table)
        return True

    def _has_applied(self, kind: str, trainer: int, step: int) -> None:
        """Notes what is applied of a trainer, who is as far as the least of what it sends."""
        self._done[kind, trainer] = max(step, self._done.get((kind, trainer), -1))
        self.clocks.advance(trainer, min(self._done[other, trainer] for other in self._kinds))

    def take_parts(self, step: int, tensors: Iterable[Tensor]) -> None:
        """Takes nothing: servers send each other nothing here."""

    def hand_out(self) -> list[tuple[BlockPlan, Sent]]:
        """Returns all blocks, in order, with what the next update has for them."""
        if self.applied < 0 or self._running is not None or not self._whole:
            return []
        update = self._running = self._whole.popleft()
        update.left = {block.index for block in self.plan.blocks}
        return [(block, self._sent(update, block)) for block in self.plan.blocks]

    def _sent(self, update: Update, block: BlockPlan) -> Sent:
        names = [merge.name for merge in block.merges]
        sent: dict[str, np.ndarray | RowGradient] = {name: update.arrays[name] for name in names}
        for name, param in block.backups.items():
            received = self._received.get((update.trainer, param))
            sent[name] = self.host[param] if received is None else received
        return sent

    def ran(self, block: BlockPlan) -> bool:
        """Notes that a block ran; tells whether the update is applied with it."""
        update = self._running
        assert update is not None
        update.left.discard(block.index)
        if update.left:
            return False
        self._has_applied(_DENSE, update.trainer, update.step)
        self._running = None
        return True

    def follows(self, trainer: int, after: int, table: str = _DENSE) -> bool:
        """Returns whether a push comes next: the one before it, of a step, is here.

        One that was lost on its way is sent again; it would count as late after its successor.
        """
        done = self._done.get((table, trainer), -1)
        here = self._newest(trainer) if table == _DENSE else self.tables.seen(table, trainer)
        return after <= max(done, here)

    def is_queued(self, trainer: int) -> bool:
        """Returns whether something of a trainer is here that is not applied yet."""
        under_way = (*self._whole, *((self._running,) if self._running is not None else ()))
        return self.tables.is_under_way or any(one.trainer == trainer for one in under_way)

    def follow(self, step: int) -> None:
        """Does nothing: a server without gradients has no steps to follow."""

    def has_made(
        self, maker: int | None, step: int, trainer: int, until: int | None = None
    ) -> bool:
        """Tells whether a value may be given to a trainer after one of its steps."""
        del maker
        return not self._kinds or self.clocks.allow(trainer, step, until)

    def is_past(self, maker: int, step: int, *, is_kept: bool) -> bool:
        """Tells that no value is too new for anybody."""
        del maker, step, is_kept
        return False

    def may_look_up(self, table: str, step: int) -> bool:
        """Tells whether rows of a table may be given to a trainer at a step."""
        del table
        return next(self.clocks.behind(step - 1), None) is None

    def gave_rows(self, table: str, trainer: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """Notes what a trainer receives of a table."""
        self.copies.give(table, trainer, keys, rows)

    def received_rows(self, table: str, trainer: int, keys: np.ndarray) -> Received | None:
        """Returns what a trainer received of rows, where gradients are corrected by it."""
        return self.copies.of(table, trainer, keys)

    def has_applied(self, step: int, trainer: int) -> bool:
        """Tells whether what a trainer sent is applied, until a step."""
        return not self._kinds or self.clocks.has(trainer, step)

    def stamp(self) -> dict[str, Plain]:
        """Returns what goes with values: how old they are at the most."""
        return {"clock": self.applied} if self._kinds else {}

    def gave(self, trainer: int, values: Iterable[tuple[str, np.ndarray | None]]) -> None:
        """Notes what a trainer receives, of parameters of which that is kept."""
        for name, value in values:
            if value is not None and name in self.plan.backed_up:
                self._received[trainer, name] = value

    def missing(self, *, step: int, pulls: bool) -> dict[str, list[str]]:
        """Returns who holds a request up, with the step that is waited for."""
        slow = self.clocks.behind(step) if pulls else self.clocks.before(step)
        least = step - self.clocks.bound if pulls else step
        return {f"trainer {trainer}": [f"its step {least}"] for trainer in slow}

    def other_rows(self, step: int, trainer: int, rows: int) -> str | None:
        """Says nothing: trainers may have batches of any size."""
        del step, trainer, rows
        return None

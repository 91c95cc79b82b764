"""State of a server that has loaded its program: values, rows of tables, and progress."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ps.server.async_scheduler import AsyncScheduler
from jaxfleet.ps.server.block_executor import BlockExecutor
from jaxfleet.ps.server.execution_plan import ServerPlan
from jaxfleet.ps.server.lease_record import LeaseRecord
from jaxfleet.ps.server.own_state import OwnState
from jaxfleet.ps.server.scheduler import Scheduler
from jaxfleet.ps.server.server_table import ServerTable
from jaxfleet.ps.server.sync_scheduler import SyncScheduler
from jaxfleet.tables import TableStore
from jaxfleet.transport.messages import Plain, Tensor

_PER_NAME = 512  # memory overhead of a name in bytes


@dataclass
class BootstrapValues:
    """Initial values of the trainers' own state, kept until all trainers have received them."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    step: int = 0

    @property
    def bytes(self) -> int:
        return sum(array.nbytes + _PER_NAME for array in self.arrays.values())

    def keep(self, tensors: Iterable[Tensor], step: int) -> None:
        """Keeps values of a step, unless newer ones are kept."""
        fresh = {tensor.name: tensor.array for tensor in tensors}
        if fresh and step >= self.step:
            self.arrays.update((name, array.copy()) for name, array in fresh.items())
            self.step = step

    def forget(self, step: int) -> None:
        """Discards the values once an applied step shows that all trainers have received them."""
        if step > self.step + 1:
            self.arrays.clear()


@dataclass
class ServerState:
    """A server's program, its values, and its progress.

    Attributes:
        host: values that the next step does not overwrite: views of the device's memory.
        extras: values outside the server's state.
        exchanges: seconds that each trainer has spent on sending pushes and waiting for values.
        own: the trainers' own state, by trainer; what all have alike is trainer 0's.
        leases: the job's ledger of samples, on server 0.
        base: the step of the state that the job began with.
        keeps_past: values of the previous step are kept, for a trainer that returns.
        keeps_rows: rows of the previous step are kept, for trainers that repeat one.
    """

    plan: ServerPlan
    executor: BlockExecutor
    scheduler: Scheduler
    host: dict[str, np.ndarray] = field(default_factory=dict)
    extras: BootstrapValues = field(default_factory=BootstrapValues)
    tables: dict[str, ServerTable] = field(default_factory=dict)
    exchanges: dict[int, float] = field(default_factory=dict)
    own: dict[int, OwnState] = field(default_factory=dict)
    leases: LeaseRecord = field(default_factory=LeaseRecord)
    base: int = 0
    keeps_past: bool = False
    keeps_rows: bool = False
    _past: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)  # by name and step

    @classmethod
    def of(cls, plan: ServerPlan, clock: Callable[[], float]) -> "ServerState":
        """Returns the state of a program without values; its tables have no rows."""
        host: dict[str, np.ndarray] = {}
        scheduler: Scheduler = SyncScheduler(plan) if plan.waits else AsyncScheduler(plan, host)
        held = cls(plan, BlockExecutor(plan, clock), scheduler, host)
        held.tables = {
            spec.name: ServerTable(spec, plan.share, plan.compensation) for spec in plan.tables
        }
        return held

    def take_over(self, other: "ServerState") -> None:
        """Goes on with the values and the progress of a program for other trainers.

        Raises:
            ProgramError: the programs differ in more than the number of trainers.
        """
        if (misfit := self.plan.unlike(other.plan)) is not None:
            raise ProgramError(misfit, hint="all trainers run one script, with one strategy")
        self.executor.take_over(other.executor)
        mine, theirs = self.scheduler, other.scheduler
        if isinstance(mine, SyncScheduler):
            assert isinstance(theirs, SyncScheduler)
            mine.take_over(theirs)
        else:
            assert isinstance(mine, AsyncScheduler)
            assert isinstance(theirs, AsyncScheduler)
            mine.take_over(theirs)
        self.host.update(other.host)
        self.tables = other.tables
        self.extras, self.base = other.extras, other.base

    @property
    def stores(self) -> list[TableStore]:
        return [table.rows for table in self.tables.values()]

    def replace_stores(self, stores: Iterable[TableStore]) -> None:
        for store in stores:
            self.tables[store.spec.name].rows = store

    def compile(self) -> None:
        self.executor.compile()
        for table in self.tables.values():
            table.compile()

    @property
    def step(self) -> int:
        """The last step applied, -1 without a state."""
        return self.scheduler.applied

    @property
    def exchange_s(self) -> float:
        """The least time that a trainer has spent in exchanges: the others also wait for it."""
        return min(self.exchanges.values(), default=0.0)

    def note_exchange(self, trainer: int, took_s: Plain) -> None:
        """Counts the time that a push reports."""
        if not isinstance(took_s, float) or not 0.0 <= took_s < math.inf:
            took_s = 0.0
        self.exchanges[trainer] = self.exchanges.get(trainer, 0.0) + took_s

    def keep_extras(self, tensors: Iterable[Tensor], step: int) -> None:
        state = self.plan.state
        self.extras.keep((tensor for tensor in tensors if tensor.name not in state), step)

    def is_known(self, name: str) -> bool:
        return name in self.extras.arrays or name in self.plan.known

    def take_made(self, step: int, views: Mapping[str, np.ndarray]) -> None:
        """Takes the results of a block that ran for a step; keeps the values that they replace.

        A trainer that returns computes a step again that is applied, from the values before it.
        """
        if self.keeps_past and self.plan.waits:
            for name in views.keys() & self.plan.state.keys() & self.host.keys():
                self._past[name] = {step - 1: self.host[name]}
        self.host.update(views)

    def note_read(self, step: int, copies: Mapping[str, np.ndarray]) -> None:
        """Keeps values that the next step overwrites on the device, as some trainer read them."""
        if self.keeps_past and self.plan.waits:
            for name in copies.keys() & self.plan.state.keys():
                kept = self._past.get(name, {})
                self._past[name] = {at: x for at, x in kept.items() if at == step - 1}
                self._past[name][step] = copies[name]

    def forget_past(self, names: Iterable[str], step: int) -> None:
        """Discards the values of a step that is replaced."""
        for name in names:
            self._past.get(name, {}).pop(step, None)

    def begin_from(self, step: int) -> None:
        """Records that the job goes on from another state, whose past is void."""
        self.base = step
        self._past.clear()
        self.own.clear()
        for table in self.tables.values():
            table.begin_anew()

    def value(self, name: str, step: int) -> np.ndarray | None:
        """Returns a value after a step, None if it is only on the device."""
        extra = self.extras.arrays.get(name)
        if extra is not None:
            return extra
        past = self._past.get(name, {}).get(step)
        return self.host.get(name) if past is None else past

    def is_ready(self, name: str, step: int, trainer: int, until: int | None = None) -> bool:
        """Whether a variable has its value of a step, or one recent enough for a trainer.

        `until` is the last step after which the value is used; `step` by default.
        """
        if name in self.extras.arrays:
            return True
        return self.scheduler.has_made(self.plan.makers.get(name), step, trainer, until)

    def is_past(self, name: str, step: int) -> bool:
        """Whether a variable's value of a step is no longer available."""
        if name in self.extras.arrays:
            return self.extras.step > step
        maker = self.plan.makers.get(name)
        if maker is None or step in self._past.get(name, {}):
            return False
        return self.scheduler.is_past(maker, step, is_kept=name in self.host)

    def stats(self) -> dict[str, Plain]:
        counts, scheduler = self.executor.counts, self.scheduler
        return {
            "step": self.step,
            "received": counts.received,
            "copies_in": counts.copies_in,
            "copies_out": counts.copies_out,
            "rows": counts.rows,
            "table_rows": sum(table.applied for table in self.tables.values()),
            "block_s": counts.block_s,
            "last_blocks_s": sum(counts.last_s.values(), 0.0),
            "duplicates": scheduler.duplicates,
            "queued_bytes": scheduler.queued_bytes + scheduler.queued_row_bytes,
            "data": self.leases.stats(scheduler.step_of),
            "tables": {name: dict(table.stats()) for name, table in self.tables.items()},
        }

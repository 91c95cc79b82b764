"""State of a server that has loaded its program."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.server.async_scheduler import AsyncScheduler
from jaxfleet.ps.server.block_executor import BlockExecutor
from jaxfleet.ps.server.execution_plan import ServerPlan
from jaxfleet.ps.server.scheduler import Scheduler
from jaxfleet.ps.server.sync_scheduler import SyncScheduler
from jaxfleet.ps.server.table import ServerTable
from jaxfleet.tables import TableStore
from jaxfleet.transport.messages import Tensor

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
    """

    plan: ServerPlan
    executor: BlockExecutor
    scheduler: Scheduler
    host: dict[str, np.ndarray] = field(default_factory=dict)
    extras: BootstrapValues = field(default_factory=BootstrapValues)
    tables: dict[str, ServerTable] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: ServerPlan) -> "ServerState":
        """Returns the state of a program without values; its tables have no rows."""
        host: dict[str, np.ndarray] = {}
        scheduler: Scheduler = SyncScheduler(plan) if plan.waits else AsyncScheduler(plan, host)
        held = cls(plan, BlockExecutor(plan), scheduler, host)
        held.tables = {
            spec.name: ServerTable(spec, plan.share, plan.compensation) for spec in plan.tables
        }
        return held

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

    def keep_extras(self, tensors: Iterable[Tensor], step: int) -> None:
        state = self.plan.state
        self.extras.keep((tensor for tensor in tensors if tensor.name not in state), step)

    def is_known(self, name: str) -> bool:
        return name in self.extras.arrays or name in self.plan.known

    def value(self, name: str) -> np.ndarray | None:
        """Returns a value, None if it is only on the device."""
        extra = self.extras.arrays.get(name)
        return self.host.get(name) if extra is None else extra

    def is_ready(self, name: str, step: int, trainer: int, until: int | None = None) -> bool:
        """Whether a variable has its value of a step, or one recent enough for a trainer.

        Args:
            name: name of the variable.
            step: the step.
            trainer: the requesting trainer.
            until: the last step after which the value is used; `step` by default.
        """
        if name in self.extras.arrays:
            return True
        return self.scheduler.has_made(self.plan.makers.get(name), step, trainer, until)

    def is_past(self, name: str, step: int) -> bool:
        """Whether a variable's value of a step is no longer available."""
        if name in self.extras.arrays:
            return self.extras.step > step
        maker = self.plan.makers.get(name)
        if maker is None:
            return False
        return self.scheduler.is_past(maker, step, is_kept=name in self.host)

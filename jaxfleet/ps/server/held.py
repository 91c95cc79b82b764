"""What a server holds once it has a program, and from which step on, or until which, it does."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.messages import Tensor
from jaxfleet.ps.server.arrivals import Arrivals
from jaxfleet.ps.server.machine import Machine
from jaxfleet.ps.server.plan import ServerPlan
from jaxfleet.ps.server.progress import Progress
from jaxfleet.ps.server.table import Table
from jaxfleet.tables import TableStore

_PER_NAME = 512  # bytes that a name costs besides its array


@dataclass
class Extras:
    """What the trainers' own state starts from, kept until all of them can have had it.

    Attributes:
        arrays: whole leaves by name.
        step: the step that they are of.
    """

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    step: int = 0

    @property
    def bytes(self) -> int:
        """What they cost."""
        return sum(array.nbytes + _PER_NAME for array in self.arrays.values())

    def keep(self, tensors: Iterable[Tensor], step: int) -> None:
        """Takes those of a step, but none that are older than what there is."""
        fresh = {tensor.name: tensor.array for tensor in tensors}
        if fresh and step >= self.step:
            self.arrays.update((name, array.copy()) for name, array in fresh.items())
            self.step = step

    def forget(self, step: int) -> None:
        """Forgets them when a step was applied that no trainer makes without having had them."""
        if step > self.step + 1:
            self.arrays.clear()


@dataclass
class Held:
    """The program of a server, its values, and where it is in its steps.

    Attributes:
        plan: the program.
        machine: holds the values on the device.
        progress: which blocks ran for which step.
        host: values that the next step does not overwrite: views of the device's memory.
        extras: values that are no state of the server.
        tables: by name.
    """

    plan: ServerPlan
    machine: Machine
    progress: Progress | Arrivals
    host: dict[str, np.ndarray] = field(default_factory=dict)
    extras: Extras = field(default_factory=Extras)
    tables: dict[str, Table] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: ServerPlan) -> "Held":
        """Returns a program without any state; its tables have no rows yet."""
        host: dict[str, np.ndarray] = {}
        progress = Progress(plan) if plan.waits else Arrivals(plan, host)
        held = cls(plan, Machine(plan), progress, host)
        held.tables = {
            spec.name: Table(spec, plan.share, plan.compensation) for spec in plan.tables
        }
        return held

    @property
    def stores(self) -> list[TableStore]:
        """The rows of its tables."""
        return [table.rows for table in self.tables.values()]

    def replace_stores(self, stores: Iterable[TableStore]) -> None:
        """Takes other rows in the place of what its tables had."""
        for store in stores:
            self.tables[store.spec.name].rows = store

    def compile(self) -> None:
        """Compiles all that a step runs.

        Raises:
            ProgramError: an operator fails, or there can be no such table.
        """
        self.machine.compile()
        for table in self.tables.values():
            table.compile()

    @property
    def step(self) -> int:
        """The last step applied, -1 without a state."""
        return self.progress.applied

    def keep_extras(self, tensors: Iterable[Tensor], step: int) -> None:
        """Keeps what is no state of the server."""
        state = self.plan.state
        self.extras.keep((tensor for tensor in tensors if tensor.name not in state), step)

    def is_known(self, name: str) -> bool:
        """Tells whether a name is that of anything here."""
        return name in self.extras.arrays or name in self.plan.known

    def value(self, name: str) -> np.ndarray | None:
        """Returns a value, None where it is on the device alone."""
        extra = self.extras.arrays.get(name)
        return self.host.get(name) if extra is None else extra

    def is_ready(self, name: str, step: int, trainer: int, until: int | None = None) -> bool:
        """Tells whether a name holds what a step makes of it, or what a trainer may then have.

        Args:
            name: a variable's.
            step: which.
            trainer: who asks.
            until: the last step that it is used after; `step` unless given.
        """
        if name in self.extras.arrays:
            return True
        return self.progress.has_made(self.plan.makers.get(name), step, trainer, until)

    def is_past(self, name: str, step: int) -> bool:
        """Tells whether what a name held at a step is no longer there."""
        if name in self.extras.arrays:
            return self.extras.step > step
        maker = self.plan.makers.get(name)
        if maker is None:
            return False
        return self.progress.is_past(maker, step, is_kept=name in self.host)

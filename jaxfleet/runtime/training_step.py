"""Protocol of the steps that `distribute` returns, whatever runs them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Protocol, Self

import numpy as np

from jaxfleet.data import Batches, Loader
from jaxfleet.ir import Program
from jaxfleet.runtime.memory_report import MemoryReport
from jaxfleet.runtime.metrics_log import AnyWriter, MetricsLog

if TYPE_CHECKING:  # a default needs Python 3.13, or a package that only type checkers bring
    from typing_extensions import TypeVar

    from jaxfleet.runtime.leased_batches import LeasedBatches  # which imports the servers' client

    State = TypeVar("State", default=Any)
    Metrics = TypeVar("Metrics", default=Any)
    Metrics_co = TypeVar("Metrics_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    State = TypeVar("State")
    Metrics = TypeVar("Metrics")
    Metrics_co = TypeVar("Metrics_co", covariant=True)

Batch = TypeVar("Batch")
Result = TypeVar("Result")


class TrainingStep(Protocol[State, Metrics_co]):
    """A distributed step: of devices, of a trainer, or of a server.

    A script written for it runs in every mode. In a server's process any use other than
    `program`, `explain`, `view`, `close` and `with` serves until the job ends, and ends the
    process.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jaxfleet as jf
        >>> def train(step: jf.TrainingStep, state, batches):
        ...     for batch in batches:
        ...         state, _ = step(state, batch)
        ...     return step.pull(state)
        >>> def add_rows(total, batch):
        ...     return total + batch.sum(0), {}
        >>> batch = jnp.ones((4, 2))
        >>> step = jf.distribute(add_rows, example=(jnp.zeros(2), batch), strategy="single")
        >>> train(step, jnp.zeros(2), [batch] * 3)
        Array([12., 12.], dtype=float32)
    """

    @property
    def program(self) -> Program:
        """The program that this process runs."""
        ...

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics_co]:
        """Runs one step; returns the new state and the metrics."""
        ...

    def pull(self, state: State) -> State:
        """Returns the state with a value for every leaf."""
        ...

    def place(self, state: State) -> State:
        """Returns the state where the step keeps it."""
        ...

    def save(
        self, path: str | Path, state: State, *, data: Mapping[str, int] | None = None
    ) -> None:
        """Writes a checkpoint, which a step in any mode restores."""

    def restore(self, path: str | Path) -> State:
        """Returns the state of a checkpoint, written in any mode."""
        ...

    def resume(self, state: State) -> tuple[State, int]:
        """Returns the state to go on from, and the number of steps that it includes.

        A script begins with it if a process may take a lost one's place: it then skips as many
        batches.
        """
        ...

    def batches(self, loader: Loader, done: int = 0) -> "Batches | LeasedBatches":
        """Returns the batches of a loader after `done` steps.

        In the relaxed modes trainers lease them, and servers have the position.
        """
        ...

    def evaluate(
        self, function: Callable[[State, Batch], Result], state: State, batch: Batch, *more: Never
    ) -> Result:
        """Returns `function(state, batch)`, computed with the current state."""
        ...

    def look_up(self, table: str, keys: Any) -> np.ndarray:
        """Returns rows of a table, float32[*keys.shape, dim]."""
        ...

    def shrink(self, table: str) -> int:
        """Evicts rows of a table by its rules; returns their number."""
        ...

    def export(self, table: str, folder: str | Path, *, text: bool = False) -> int:
        """Exports a table's rows into a new folder; returns their number."""
        ...

    def stats(self) -> dict[str, Any]:
        """Returns counters."""
        ...

    def log_to(
        self,
        writer: AnyWriter,
        *,
        every: int = 1,
        statistics: bool = True,
        only_first: bool = True,
        start: int = 0,
    ) -> MetricsLog:
        """Writes the scalar metrics of the following steps to a folder or writer."""
        ...

    def memory_report(self) -> MemoryReport:
        """Returns the memory use, before and after it was fitted to a budget."""
        ...

    def explain(self) -> str:
        """Describes the decisions made, and why."""
        ...

    def view(self, path: str | Path, *, measure: int = 0) -> Path:
        """Writes a report of the step, one HTML file; `measure` calls are timed if they can be."""
        ...

    def close(self) -> None:
        """Ends this process's part."""

    def __enter__(self) -> Self: ...

    def __exit__(self, error: type[BaseException] | None, /, *_: object) -> None: ...

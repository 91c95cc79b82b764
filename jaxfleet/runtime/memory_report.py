"""Memory of a step or a trainer, before and after it was fitted to a budget: text and plot.

A trainer's program is executables with messages between them. Counted are the values that these
executables leave for later ones, and the use of the running one; not the messages' own copies.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxfleet.analysis.memory import MemoryProfile
from jaxfleet.analysis.memory.profile import size_text
from jaxfleet.capture import Captured
from jaxfleet.capture.signature import spec_of
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Program
from jaxfleet.lower import ExecutableCache, Interface, LoweredStep
from jaxfleet.lower.function import bind_sizes, cut_axes
from jaxfleet.lower.partition import rows_of
from jaxfleet.lower.staged import Peak, Stage, StagedStep, peak_of, peak_of_one, trainer_stages
from jaxfleet.lower.staged_sharding import layout_for
from jaxfleet.observability.plots import curve, drawing, limit
from jaxfleet.pipeline import Record
from jaxfleet.runtime.memory_fit import Fit, Fitting, Memory
from jaxfleet.runtime.memory_html import report_html
from jaxfleet.runtime.transpile import transpile
from jaxfleet.strategy import DistributedStrategy

if TYPE_CHECKING:  # every step reports its memory, and only jobs with servers need their programs
    from jaxfleet.runtime.pserver_job import JobPrograms


@dataclass(frozen=True)
class DeviceMemory(Memory):
    """Memory use of a program, as one function or in several executables, for these `shapes`."""

    shapes: Sequence[tuple[int, ...]]  # of the data

    @property
    @abstractmethod
    def function(self) -> Any:
        """The jitted function, or a `StagedStep`."""

    @abstractmethod
    def compiled(self) -> Any:
        """Returns the executable of a function that is one."""

    def peak(self) -> Peak:
        run = self.function
        if isinstance(run, StagedStep):
            return run.peak(self.shapes)
        return peak_of_one(self.compiled())

    @property
    def runs(self) -> Sequence[Any]:
        run = self.function
        return [part.run for part in run.at(self.shapes)] if isinstance(run, StagedStep) else [run]


@dataclass(frozen=True)
class StepMemory(DeviceMemory):
    """A lowered step, for batches of one size."""

    captured: Captured  # the step
    interface: Interface  # mapping of its pytrees to variables
    lowered: LoweredStep  # the part that devices run, compiled
    devices: Sequence[Any]  # where it runs

    @property
    def fetched(self) -> tuple[str, ...]:
        return self.interface.metrics

    @property
    def sizes(self) -> Mapping[str, int]:
        """Values of the symbolic sizes, for the rows of one device."""
        layout = layout_for(self.devices, cut_axes(self.program))
        fed = [self.program.variables[leaf.name] for leaf in self.captured.signature.batch]
        own = [layout.own_shape(v, shape) for v, shape in zip(fed, self.shapes, strict=True)]
        return bind_sizes(zip(fed, own, strict=True))

    @property
    def function(self) -> Any:
        return self.lowered.run

    def compiled(self) -> Any:
        signature = self.captured.signature
        state = [spec_of(leaf) for leaf in signature.state]
        leaves = zip(signature.batch, self.shapes, strict=True)
        data = [spec_of(leaf, shape) for leaf, shape in leaves]
        return self.lowered.lower(state, data).compile()


@dataclass(frozen=True)
class MemoryReport:
    """Memory use of a step besides its inputs and outputs, on one device.

    `str(report)` is the text.

    Attributes:
        before: the bytes at each operator of the original step, before xla merges operators.
        before_bytes: xla's peak of the original step.
        after: the bytes at each operator of the step as it runs.
        after_bytes: xla's peak of the step as it runs.
        executables: number of executables run, and number of distinct ones.
        fit: result for the budget; None without a budget.
        host_bytes: peak of offloaded values in pinned host memory, beside `after_bytes`.
        host_is_apart: whether that is separate from the device's memory.
    """

    before: MemoryProfile
    before_bytes: int
    after: MemoryProfile
    after_bytes: int
    executables: tuple[int, int]
    fit: Fit | None = None
    host_bytes: int = 0
    host_is_apart: bool = True

    def __str__(self) -> str:
        lines = [f"memory of '{self.after.program.name}', without its state, batch and results"]
        if self.fit is not None:
            lines.append(f"  budget   {size_text(self.fit.budget)}: {self.fit.note}")
        lines.append(f"  as it is {size_text(self.before_bytes)} by xla; {_head(self.before)}")
        if self.fit is not None and self.fit.passes:
            share = self.after_bytes / max(1, self.before_bytes)
            lines.append(
                f"  as run   {size_text(self.after_bytes)} by xla, {share:.2f} of it; "
                f"{self.executables[0]} executables, {self.executables[1]} of them compiled"
            )
        if self.host_bytes:
            same = "" if self.host_is_apart else "; of a CPU, that is the same memory"
            lines.append(f"  on host  {size_text(self.host_bytes)} more in its pinned memory{same}")
        return "\n".join([*lines, *(f"  {line}" for line in self.after.text().splitlines())])

    def __repr__(self) -> str:
        before, after = size_text(self.before_bytes), size_text(self.after_bytes)
        return f"MemoryReport('{self.after.program.name}': {before} as it is, {after} as run)"

    def _repr_html_(self) -> str:
        return report_html(self)

    def plot(self, path: str | Path) -> None:
        """Draws the bytes over the step's operators, before and after, with the budget's line.

        Args:
            path: a file; its suffix selects the format: `.png`, `.svg`.

        Raises:
            StrategyError: matplotlib is not installed, or does not write this format.
        """
        name = self.after.program.name
        with drawing(path, f"memory of '{name}', besides its state and batch") as axes:
            _draw(axes, self.before, f"as it is ({size_text(self.before_bytes)} by xla)", 0)
            if self.after is not self.before:
                _draw(axes, self.after, f"as run ({size_text(self.after_bytes)} by xla)", 1)
            if self.fit is not None:
                limit(axes, self.fit.budget / 1e6, f"budget ({size_text(self.fit.budget)})")
            axes.set_xlim(0, 1)
            axes.set_ylim(bottom=0)
            axes.set_xlabel("part of the step's operators that have run")
            axes.set_ylabel("MB alive, before operators are merged")
            axes.legend()


def report_of(memory: Memory, fit: Fit | None) -> MemoryReport:
    """Returns the report of a program, fitted to a budget or not; compiles if necessary."""
    after, peak = memory.curve(), memory.peak()
    before, before_bytes = after, peak.bytes
    if fit is not None:
        before_bytes = fit.before
        if fit.passes:
            before = replace(memory, program=fit.original).curve()
    return MemoryReport(
        before,
        before_bytes,
        after,
        peak.bytes,
        memory.executables,
        fit,
        peak.host_bytes,
        memory.host_is_apart,
    )


def _head(curve: MemoryProfile) -> str:
    return f"{size_text(curve.peak)} before operators are merged"


def _draw(axes: Any, profile: MemoryProfile, label: str, number: int) -> None:
    count = max(1, len(profile.bytes))
    places, sizes = [n / count for n in range(count)], [size / 1e6 for size in profile.bytes]
    curve(axes, [*places, 1.0], [*sizes, *sizes[-1:]] or [0.0, 0.0], label, number)


@dataclass(frozen=True)
class TrainerMemory(Memory):
    """A trainer's program, for one number of rows."""

    rows: int  # of this trainer
    cache: ExecutableCache  # of executables

    @property
    def fetched(self) -> tuple[str, ...]:
        fetches = (op.reads for op in reversed(self.program.root.ops) if op.type == "fetch")
        return next(fetches, ())

    @property
    def sizes(self) -> Mapping[str, int]:
        return rows_of(self.program, self.rows)

    @cached_property
    def _parts(self) -> tuple[Stage, ...]:
        return trainer_stages(self.program, self.sizes, self.fetched, self.cache)

    @property
    def runs(self) -> list[Any]:
        return [part.run for part in self._parts]

    def peak(self) -> Peak:
        return peak_of(self._parts, self.fetched)


def memory_of(
    job: "JobPrograms", strategy: DistributedStrategy, rows: int, cache: ExecutableCache
) -> TrainerMemory:
    """Returns the memory use of a job's trainer for the example's number of rows.

    Raises:
        StrategyError: its step looks up tables, or it updates by itself.
    """
    if "tables" in job.trainer.attrs:
        what = "the memory of a step that looks up tables is not planned"
        raise StrategyError(what, hint="leave memory_budget out")
    if strategy.communication in {"geo", "fl"}:
        what = (
            f"the memory of trainers with communication={strategy.communication!r} is not planned"
        )
        hint = "strategy.passes='recompute' cuts what they run (docs/memory.md)"
        raise StrategyError(what, hint=hint)
    return TrainerMemory(job.trainer, jax.devices()[0], own_rows(job, strategy, rows), cache)


def own_rows(job: "JobPrograms", strategy: DistributedStrategy, rows: int) -> int:
    """Returns the rows of one trainer in a call with this number."""
    return rows if job.is_whole or strategy.batch == "local" else rows // job.trainers


def fitting(
    programs: "Callable[[Program], JobPrograms]",
    strategy: DistributedStrategy,
    rows: int,
    cache: ExecutableCache,
) -> "Callable[[Program], JobPrograms]":
    """Wraps `programs` to fit the trainer's program to the strategy's budget.

    `rows` are those of the example's batch.
    """
    budget = strategy.memory_budget
    if budget is None:
        return programs

    def make(program: Program) -> "JobPrograms":
        job = programs(program)
        memory = memory_of(job, strategy, rows, cache)
        known, tried = cache.runs(), [memory]

        def of(program: Program) -> TrainerMemory:
            tried.append(replace(memory, program=program))
            return tried[-1]

        fit = Fitting(memory, of, strategy.offload).to(budget)
        made, record = transpile(job.trainer, fit.passes, dump_dir=None)
        known += replace(memory, program=made).runs
        cache.forget([run for one in tried for run in one.runs], but=known)
        more = (replace(s, index=s.index + len(job.dumps) - 1) for s in list(record)[1:])
        return replace(job, trainer=made, dumps=Record([*job.dumps, *more]), fit=fit)

    return make

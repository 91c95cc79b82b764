"""Memory of a step, before and after it was fitted to a budget: as text and as a plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxfleet.analysis.memory import MemoryProfile, memory_profile
from jaxfleet.analysis.memory.profile import size_text
from jaxfleet.capture import Captured
from jaxfleet.capture.pytrees import spec_of
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Program
from jaxfleet.lower import Interface, LoweredStep
from jaxfleet.lower.function import bind_sizes, cut_axes
from jaxfleet.lower.host_transfer import host_memory_is_apart
from jaxfleet.lower.staged import Peak, StagedStep, count_runs, peak_of_one
from jaxfleet.lower.staged_sharding import layout_for
from jaxfleet.pipeline import Record
from jaxfleet.runtime.memory_fit import Fit
from jaxfleet.runtime.trainer_memory import TrainerMemory


@dataclass(frozen=True)
class StepMemory:
    """A lowered step, for batches of one size.

    Attributes:
        captured: the step.
        interface: mapping of its pytrees to variables.
        program: the part that devices run.
        lowered: that, compiled.
        devices: where it runs.
        rows: of the whole batch.
    """

    captured: Captured
    interface: Interface
    program: Program
    lowered: LoweredStep
    devices: Sequence[Any]
    rows: int

    @property
    def fetched(self) -> tuple[str, ...]:
        return self.interface.metrics

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        shapes = [leaf.shape for leaf in self.captured.signature.batch]
        return [(self.rows, *shape[1:]) if shape else () for shape in shapes]

    @property
    def sizes(self) -> Mapping[str, int]:
        """Values of the symbolic sizes, for the rows of one device."""
        layout = layout_for(self.devices, cut_axes(self.program))
        fed = [self.program.variables[leaf.name] for leaf in self.captured.signature.batch]
        own = [layout.own_shape(v, shape) for v, shape in zip(fed, self.shapes, strict=True)]
        return bind_sizes(zip(fed, own, strict=True))

    @property
    def host_is_apart(self) -> bool:
        return host_memory_is_apart(self.devices[0])

    def curve(self) -> MemoryProfile:
        return memory_profile(self.program, self.sizes, keep=self.fetched)

    def peak(self) -> Peak:
        run = self.lowered.run
        if isinstance(run, StagedStep):
            return run.peak(self.shapes)
        signature = self.captured.signature
        state = [spec_of(leaf) for leaf in signature.state]
        leaves = zip(signature.batch, self.shapes, strict=True)
        executable = self.lowered.lower(state, [spec_of(leaf, shape) for leaf, shape in leaves])
        return peak_of_one(executable.compile())

    @property
    def executables(self) -> tuple[int, int]:
        return count_runs(self.runs)

    @property
    def runs(self) -> Sequence[Any]:
        run = self.lowered.run
        return [part.run for part in run.at(self.shapes)] if isinstance(run, StagedStep) else [run]


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

    def plot(self, path: str | Path) -> None:
        """Draws the bytes over the step's operators, before and after, with the budget's line.

        Args:
            path: a file; its suffix selects the format: `.png`, `.svg`.

        Raises:
            StrategyError: matplotlib is not installed.
        """
        figure, axes = _axes()
        _draw(axes, self.before, f"as it is ({size_text(self.before_bytes)} by xla)")
        if self.after is not self.before:
            _draw(axes, self.after, f"as run ({size_text(self.after_bytes)} by xla)")
        if self.fit is not None:
            label = f"budget ({size_text(self.fit.budget)})"
            axes.axhline(self.fit.budget / 1e6, color="black", linestyle="--", label=label)
        axes.set_xlabel("part of the step's operators that have run")
        axes.set_ylabel("MB alive, before operators are merged")
        axes.set_title(self.after.program.name)
        axes.legend()
        figure.savefig(path)


def report_of(memory: StepMemory | TrainerMemory, fit: Fit | None, dumps: Record) -> MemoryReport:
    """Returns the report of a step, with the fit to its budget; compiles if necessary."""
    after, peak = memory.curve(), memory.peak()
    before, before_bytes = after, peak.bytes
    if fit is not None and fit.passes:
        before = replace(memory, program=dumps[fit.passes[0].name].before).curve()
        before_bytes = fit.before
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


def _draw(axes: Any, curve: MemoryProfile, label: str) -> None:
    count = max(1, len(curve.bytes))
    axes.step([n / count for n in range(count)], [size / 1e6 for size in curve.bytes], label=label)


def _axes() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # an extra
    except ImportError as error:
        hint = 'pip install "jaxfleet[plot]"'
        raise StrategyError("memory_report: matplotlib is not installed", hint=hint) from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    return figure, figure.subplots()

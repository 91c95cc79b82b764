"""What a step takes in memory, before and after it was made to fit: as text, and drawn."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxfleet.analysis.memory import Curve
from jaxfleet.analysis.memory.curve import size_text
from jaxfleet.errors import StrategyError
from jaxfleet.pipeline import Record
from jaxfleet.runtime.memory_fit import Fit
from jaxfleet.runtime.step_memory import StepMemory
from jaxfleet.runtime.trainer_memory import TrainerMemory


@dataclass(frozen=True)
class MemoryReport:
    """What a step takes in memory besides what goes in and comes out, on one device.

    `str` of it is the text.

    Attributes:
        before: the bytes at each operator of the step as it is, before xla merges operators.
        before_bytes: the peak of the step as it is, by xla.
        after: the bytes at each operator of the step as it runs.
        after_bytes: the peak of the step as it runs, by xla.
        executables: how many the step runs one after another, and how many of them differ.
        fit: what was found for the budget; None where none was asked for.
        host_bytes: the most that waits in pinned memory of the host, beside `after_bytes`.
        host_is_apart: whether that is other memory than the device's.
    """

    before: Curve
    before_bytes: int
    after: Curve
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
            path: a file; its ending says what it is: `.png`, `.svg`.

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
    """Returns the report of a step; compiles what is not compiled.

    Args:
        memory: of the step as it runs.
        fit: what was found for its budget.
        dumps: what passes did to it.
    """
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


def _head(curve: Curve) -> str:
    return f"{size_text(curve.peak)} before operators are merged"


def _draw(axes: Any, curve: Curve, label: str) -> None:
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

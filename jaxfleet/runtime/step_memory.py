"""What a lowered step takes in memory: as its program says it, and as xla does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxfleet.analysis.memory import Curve, curve_of
from jaxfleet.capture import Captured
from jaxfleet.capture.trees import spec_of
from jaxfleet.ir import Program
from jaxfleet.lower import Interface, LoweredStep
from jaxfleet.lower.function import cut_axes
from jaxfleet.lower.moves import host_memory_is_apart
from jaxfleet.lower.part_layout import layout_for
from jaxfleet.lower.part_step import PartStep
from jaxfleet.lower.peak import Peak, count_runs, peak_of_one
from jaxfleet.lower.sizes import bind_sizes


@dataclass(frozen=True)
class StepMemory:
    """A lowered step, fed batches of so many rows.

    Attributes:
        captured: the step.
        interface: how its pytrees map to variables.
        program: what of it runs.
        lowered: that, compiled.
        devices: what it runs on.
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
        """What is read when the step is over."""
        return self.interface.metrics

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the batch's leaves, on all devices."""
        shapes = [leaf.shape for leaf in self.captured.signature.batch]
        return [(self.rows, *shape[1:]) if shape else () for shape in shapes]

    @property
    def sizes(self) -> Mapping[str, int]:
        """A number for every letter: of the rows of one device."""
        layout = layout_for(self.devices, cut_axes(self.program))
        fed = [self.program.variables[leaf.name] for leaf in self.captured.signature.batch]
        own = [layout.own_shape(v, shape) for v, shape in zip(fed, self.shapes, strict=True)]
        return bind_sizes(zip(fed, own, strict=True))

    @property
    def host_is_apart(self) -> bool:
        """Tells whether pinned memory of the host is other memory than the device's."""
        return host_memory_is_apart(self.devices[0])

    def curve(self) -> Curve:
        """Returns the bytes at each operator, before xla merges operators."""
        return curve_of(self.program, self.sizes, keep=self.fetched)

    def peak(self) -> Peak:
        """Returns the peak as xla says it, on one device; compiles what is not compiled."""
        run = self.lowered.run
        if isinstance(run, PartStep):
            return run.peak(self.shapes)
        signature = self.captured.signature
        state = [spec_of(leaf) for leaf in signature.state]
        leaves = zip(signature.batch, self.shapes, strict=True)
        executable = self.lowered.lower(state, [spec_of(leaf, shape) for leaf, shape in leaves])
        return peak_of_one(executable.compile())

    @property
    def executables(self) -> tuple[int, int]:
        """How many executables a step runs, and how many of them differ."""
        return count_runs(self.runs)

    @property
    def runs(self) -> Sequence[Any]:
        """The jitted functions that a step runs one after another."""
        run = self.lowered.run
        return [part.run for part in run.at(self.shapes)] if isinstance(run, PartStep) else [run]

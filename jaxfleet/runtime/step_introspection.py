"""Views of a step without running it: programs, compiled text, memory, explanations."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxfleet.capture import Captured
from jaxfleet.capture.signature import spec_of
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Program
from jaxfleet.observability import Progress
from jaxfleet.pipeline import Record
from jaxfleet.report import Measured
from jaxfleet.runtime.compiled_variants import Variant, Variants
from jaxfleet.runtime.explain import explain
from jaxfleet.runtime.memory_report import MemoryReport, report_of
from jaxfleet.runtime.step_call import Call
from jaxfleet.runtime.step_html import Explanation, step_html
from jaxfleet.runtime.step_inputs import place_batch, type_of
from jaxfleet.runtime.step_state import AuxiliaryState, LastState
from jaxfleet.runtime.step_timing import Calls, measured, zeros
from jaxfleet.runtime.step_view import add_to_dump, write_view
from jaxfleet.strategy import DistributedStrategy

_unflatten = jax.tree_util.tree_unflatten


class StepViews:
    """Read-only views of a `Step`.

    Attributes:
        strategy: how it is distributed.
        devices: where it runs.
        captured: the one-device program.
    """

    strategy: DistributedStrategy
    devices: tuple[Any, ...]
    captured: Captured
    _variants: Variants
    _example: Variant
    _held: AuxiliaryState | None
    _calls: dict[tuple[Any, ...], Call]

    @property
    def program(self) -> Program:
        """The transpiled program."""
        return self._example.program

    @property
    def dumps(self) -> Record:
        """Record of every pass; index it by number or by a pass's name."""
        return self._example.dumps

    @property
    def compiled(self) -> Any:
        """The step as one jitted function, `(state, batch) -> (state, metrics)`.

        For example for `jax.export`: it neither checks, places nor waits. It is one executable,
        independent of a memory budget and of the step's own executables.

        Raises:
            StrategyError: the step looks up tables, or has auxiliary state, which a function
                cannot.
        """
        if self._held is not None:
            what = (
                "a step that holds more than its state is not a function of state and batch alone"
            )
            raise StrategyError(what, hint="call the step itself; step.lower() shows what it runs")
        if self._example.tables is not None:
            what = "a step that looks up tables is not a function of state and batch alone"
            raise StrategyError(what, hint="call the step itself; step.lower() shows what it runs")
        return self._example.lowered.function

    def lower(self, state: Any = None, batch: Any = None) -> Any:
        """Returns jax's `Lowered` of the step's computation: one function of the leaves.

        A step that is cut, for example for a memory budget, runs as several executables instead.

        Args:
            state: a state or its types; by default the example's.
            batch: a batch or its types; by default the example's.
        """
        signature, leaves_of = self.captured.signature, jax.tree_util.tree_leaves
        leaves = [spec_of(x) for x in signature.state] if state is None else leaves_of(state)
        data = [spec_of(x) for x in signature.batch] if batch is None else leaves_of(batch)
        if self._example.tables is not None:
            data = self._example.tables.types(data)
        return self._example.lowered.lower([_type_of(leaf) for leaf in leaves], data)

    def example_types(self) -> tuple[Any, Any]:
        """Returns the types of the example's state and batch, as jax's `ShapeDtypeStruct`s."""
        signature = self.captured.signature
        state = _unflatten(signature.state_tree, [spec_of(leaf) for leaf in signature.state])
        batch = _unflatten(signature.batch_tree, [spec_of(leaf) for leaf in signature.batch])
        return state, batch

    def memory_analysis(self) -> Any:
        """Returns XLA's memory analysis of the compiled step, in bytes, of one device.

        Raises:
            StrategyError: it is several executables, for example for a memory budget.
        """
        return self._executable().memory_analysis()

    def cost_analysis(self) -> Any:
        """Returns XLA's cost analysis of the compiled step: flops and bytes of one device.

        Raises:
            StrategyError: it is several executables, for example for a memory budget.
        """
        return self._executable().cost_analysis()

    def as_text(self) -> str:
        """Returns the optimized HLO of the compiled step.

        Raises:
            StrategyError: it is several executables, for example for a memory budget.
        """
        return str(self._executable().as_text())

    def memory_report(self) -> MemoryReport:
        """Returns the step's memory use, before and after it was fitted to a budget.

        Raises:
            StrategyError: the step looks up tables.
        """
        rows = self.captured.signature.rows
        with Progress(f"memory_report of '{self.program.name}'") as progress:
            progress.show("compiling it")
            return report_of(self._variants.memory(rows), self._example.fit)

    def explain(self) -> Explanation:
        """Returns about twenty lines on the decisions made, and why."""
        return explain(self.captured, self.strategy, self.devices, self.program, self.dumps)

    def view(self, path: str | Path, *, measure: int = 0) -> Path:
        """Writes a report of the step, of every batch size that was compiled; returns its path.

        The report is one HTML file that needs no network; see `docs/view.md`. `jaxfleet view` makes
        the same of a script or a dump. Not collective: each process writes its own.

        Args:
            path: a file, replaced if it exists.
            measure: how many calls to time, for predicted against measured time; the default is
                none. They compute with zeros of the example's types, apart from the training state.
        """
        timing = self._measured(measure) if measure else None
        ran = [call.variant for call in self._calls.values()]
        return write_view(path, self._variants.histories(ran, {id(self._example): timing}))

    def _measured(self, calls: int) -> Measured:
        own = [device for device in self.devices if device.process_index == jax.process_index()]
        return measured(own, self._made_up, calls)

    def _measure_for_dump(self, calls: int) -> None:
        """Adds the times of calls and XLA's memory to the example's dump."""
        folder = self._example.dumps.folder
        if folder is not None:
            times = {id(self._example): self._measured(calls)}
            history = self._variants.history_of(self._example, times[id(self._example)])
            add_to_dump(folder, history)

    def _made_up(self) -> Calls:
        """Returns the step as a function, and a state and a batch of zeros."""
        if any(device.process_index != jax.process_index() for device in self.devices):
            what = "the devices of other processes would have to run it too"
            raise StrategyError(what, hint="measure a step of one process")
        state, batch = map(zeros, self.example_types())
        if self._held is None and self._example.tables is None and not self._is_cut:
            data, tree = jax.tree_util.tree_flatten(batch)
            shardings = self._example.lowered.batch_shardings
            data = place_batch(data, shardings, state=LastState())
            return Calls(self.compiled, state, _unflatten(tree, data))
        # What it holds, its tables and its executables belong to training: another step has its own
        strategy = replace(self.strategy, on_nonfinite="warn")
        twin = type(self)(self.captured, strategy, self.devices)  # type: ignore[call-arg]
        note = "" if self._example.tables is None else "Its keys are zeros: a row of each table."
        return Calls(twin, state, batch, note)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        mode, count = self.strategy.mode, len(self.devices)
        return f"Step('{self.program.name}', mode='{mode}', devices={count})"

    def _repr_html_(self) -> str:
        kind, count = self.devices[0].platform, len(self.devices)
        rows = [
            ("mode", self.strategy.mode),
            ("devices", f"{count} {kind} device{'s' * (count != 1)}"),
            ("example", f"batch of {self.captured.signature.rows} rows"),
        ]
        if self._example.fit is not None:
            rows.append(("memory budget", self._example.fit.note))
        return step_html(
            type(self).__name__,
            self.captured,
            rows,
            programs=self._variants.programs(),
            folder=self.dumps.folder,
        )

    def _executable(self) -> Any:
        self._executable_is_one()
        with Progress(f"'{self.program.name}'") as progress:
            progress.show("compiling it")
            return self.lower().compile()  # jax caches the compilation, for this and for the call

    @property
    def _is_cut(self) -> bool:
        return any(op.type == "cut" for op in self.program.root.ops)

    def _executable_is_one(self) -> None:
        if self._is_cut:
            what = f"'{self.program.name}' runs as several executables, and xla describes one"
            hint = "step.memory_report() shows what they take; step.lower() lowers all as one"
            raise StrategyError(what, hint=hint)


def _type_of(leaf: Any) -> jax.ShapeDtypeStruct:
    shape, dtype = type_of(leaf)
    weak = isinstance(leaf, int | float) or bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)

"""A step as it is compiled for the batches that come: one for all sizes, or one for each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxfleet.analysis.labels import own_state
from jaxfleet.analysis.memory.reused import held_by
from jaxfleet.capture import Captured
from jaxfleet.capture.outer import trace_outer
from jaxfleet.capture.trace import BATCH_LETTER
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Kind, Program
from jaxfleet.ir.specialize import specialize
from jaxfleet.lower import Interface, LoweredStep, lower_step
from jaxfleet.lower.blocks import ExecutableCache
from jaxfleet.passes._slice_sums import may_slice_batch
from jaxfleet.passes.interleave_slices import InterleaveSlices, goes_over_slices
from jaxfleet.passes.scan_slices import ScanSlices, counts_out_slices
from jaxfleet.passes.stride_slices import StrideSlices
from jaxfleet.pipeline import Record
from jaxfleet.runtime.held_state import HeldState, beside
from jaxfleet.runtime.memory_fit import Fit, Fitting
from jaxfleet.runtime.reductions import over_gloo
from jaxfleet.runtime.step_memory import StepMemory
from jaxfleet.runtime.step_tables import StepTables
from jaxfleet.runtime.strategy import DistributedStrategy, check_skips_no_rows
from jaxfleet.runtime.transpile import pipeline_for, transpile


@dataclass(frozen=True)
class Variant:
    """The step for one way the batch is captured.

    Attributes:
        program: transpiled.
        dumps: what every pass did.
        lowered: compiled.
        metrics_tree: of what it returns besides the state.
        tables: what it looks rows up in; None where it looks up none.
        interface: how pytrees map to its variables.
        fit: what was found for a budget of memory; None where there is none.
    """

    program: Program
    dumps: Record
    lowered: LoweredStep
    metrics_tree: Any
    interface: Interface
    tables: StepTables | None = None
    fit: Fit | None = None

    def holds(self, captured: Captured) -> HeldState | None:
        """Returns what holds more than the state from step to step; None where there is nothing."""
        if not self.interface.beside and not own_state(self.program):
            return None
        return HeldState(captured, self.program, self.interface, self.lowered)


class Variants:
    """Makes the step for whatever number of rows comes.

    Args:
        captured: the step.
        strategy: how it is distributed.
        devices: what it runs on.
        dump_dir: where passes are dumped.
    """

    def __init__(
        self,
        captured: Captured,
        strategy: DistributedStrategy,
        devices: Sequence[Any],
        dump_dir: Path | None,
    ) -> None:
        self._captured, self._strategy = captured, strategy
        self._devices, self._dump_dir = devices, dump_dir
        self._made: dict[int | None, Variant] = {}
        self._cache = ExecutableCache()

    def at(self, rows: int) -> Variant:
        """Returns the step for batches of so many rows."""
        captured = self._for_slices(self._captured.at(rows), rows)
        if captured.rows not in self._made:
            made = self._make(captured)
            if self._strategy.memory_budget is not None:
                fit = self._fit(self._memory(captured, made, rows), self._strategy.memory_budget)
                made = self._make(captured, fit) if fit.passes else replace(made, fit=fit)
                self._cache.keep(self._memory(captured, made, rows).runs)
            self._made[captured.rows] = made
        return self._made[captured.rows]

    def memory(self, rows: int) -> StepMemory:
        """Returns what the step takes in memory for batches of so many rows.

        Raises:
            StrategyError: the step looks up tables.
        """
        captured = self._for_slices(self._captured.at(rows), rows)
        return self._memory(captured, self.at(rows), rows)

    def _for_slices(self, captured: Captured, rows: int) -> Captured:
        """Returns the step for these rows alone, where it adds up over slices of them.

        Each device then has a part of every slice, which is only known of a number of rows.
        """
        devices = len(self._devices)
        if devices == 1 or not _has_slices(captured.program):
            return captured
        program = specialize(captured.program, {} if captured.rows else {BATCH_LETTER: rows})
        sliced = InterleaveSlices(devices=devices).run(ScanSlices().run(program))
        sliced = StrideSlices(devices=devices).run(sliced)
        if sliced == program:
            return captured
        signature = captured.signature.with_rows(rows)
        return replace(captured, program=program, signature=signature, rows=rows)

    def _make(self, captured: Captured, fit: Fit | None = None) -> Variant:
        described = "tables" in captured.program.attrs
        if described:
            _check_for_tables(self._strategy)
        passes = pipeline_for(
            self._strategy,
            devices=len(self._devices),
            over_gloo=over_gloo(self._devices),
            on_cpus=all(device.platform == "cpu" for device in self._devices),
            tables=described,
            loss=_loss(self._strategy, captured),
            outer=_outer(self._strategy, captured),
            slices=captured.rows is not None and _has_slices(captured.program),
        )
        passes += fit.passes if fit is not None else ()
        program, record = transpile(captured.program, passes, dump_dir=self._dump_dir)
        metrics = held_by(program, captured.metrics)  # `memory_optimize` may have moved some
        interface = replace(_interface(captured), metrics=metrics, beside=tuple(beside(program)))
        tables = StepTables.of(program, interface)
        if tables is not None:
            interface = tables.interface
        self._check_lowering(program)
        lowered = self._lower(program if tables is None else tables.program, interface)
        return Variant(program, record, lowered, captured.metrics_tree, interface, tables, fit)

    def _check_lowering(self, program: Program) -> None:
        is_cut = any(op.type == "cut" for op in program.root.ops)
        if is_cut and self._strategy.lowering == "pmap" and len(self._devices) > 1:
            what = "strategy: lowering 'pmap' with passes that cut the step"
            hint = "leave lowering out: what is cut into executables runs as shard_map"
            raise StrategyError(what, hint=hint)

    def _fit(self, memory: StepMemory, budget: float) -> Fit:
        def of(program: Program) -> StepMemory:
            lowered = self._lower(program, memory.interface)
            return replace(memory, program=program, lowered=lowered)

        return Fitting(memory, of, self._strategy.offload).to(budget)

    def _lower(self, program: Program, interface: Interface) -> LoweredStep:
        return lower_step(
            program,
            interface,
            devices=self._devices,
            lowering=self._strategy.lowering,
            donate=self._strategy.donate,
            cache=self._cache,
        )

    def _memory(self, captured: Captured, variant: Variant, rows: int) -> StepMemory:
        if variant.tables is not None:
            what = "the memory of a step that looks up tables is not planned"
            raise StrategyError(what, hint="leave memory_budget out")
        return StepMemory(
            captured, variant.interface, variant.program, variant.lowered, self._devices, rows
        )


def _loss(strategy: DistributedStrategy, captured: Captured) -> str:
    """Returns the variable of the metric that the strategy calls the loss, where it does."""
    name = strategy.adaptive
    if not name:
        return ""
    found = [x for x in captured.metrics if x in {name, f"metrics/{name}"}]
    variables = captured.program.root.variables
    numbers = [x for x in found if x in variables and variables[x].shape == ()]
    if not numbers or variables[numbers[0]].dtype != "f32":
        what = f"strategy: adaptive is {name!r}, and the step returns no such number in float32"
        have = ", ".join(x.removeprefix("metrics/") for x in captured.metrics) or "none"
        raise StrategyError(what, hint=f"its metrics are: {have}")
    return numbers[0]


def _outer(strategy: DistributedStrategy, captured: Captured) -> str:
    """Returns the text of what the strategy's outer optimizer does, where it has one."""
    if strategy.outer is None:
        return ""
    return str(trace_outer(strategy.outer, captured.program.of_kind(Kind.PARAM)))


def _check_for_tables(strategy: DistributedStrategy) -> None:
    if strategy.amp == "float16":
        what = "amp='float16' with a step that looks up tables, whose rows change at every step"
        raise StrategyError(what, hint="amp='bfloat16' skips no steps")
    check_skips_no_rows(strategy)
    if strategy.communication == "local_sgd" or strategy.merge > 1:
        given = "merge" if strategy.merge > 1 else "communication 'local_sgd'"
        what = f"{given} with a step that looks up tables, whose rows change at every step"
        raise StrategyError(what, hint="communication='sync' and merge=1; or mode='pserver'")


def _interface(captured: Captured) -> Interface:
    signature = captured.signature
    return Interface(
        tuple(leaf.name for leaf in signature.state),
        tuple(leaf.name for leaf in signature.batch),
        captured.metrics,
        signature.state_tree,
        signature.batch_tree,
        captured.metrics_tree,
    )


def _has_slices(program: Program) -> bool:
    """Whether a step may go over slices of the batch, in a loop or written out."""
    in_loops = goes_over_slices(program) or counts_out_slices(program)
    return in_loops or may_slice_batch(program)

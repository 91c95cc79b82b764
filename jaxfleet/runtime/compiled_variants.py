"""Compiled variants of a step: one for all batch sizes, or one for each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxfleet.analysis.memory.shared_names import final_variables
from jaxfleet.analysis.sharding import own_state
from jaxfleet.capture import Captured
from jaxfleet.capture.outer_optimizer import trace_outer
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Kind, Program
from jaxfleet.lower import Interface, LoweredStep, lower_step
from jaxfleet.lower.blocks import ExecutableCache
from jaxfleet.passes.pipelines import collective_pipeline, slicing_passes
from jaxfleet.pipeline import Record
from jaxfleet.runtime.auxiliary_state import AuxiliaryState, beside
from jaxfleet.runtime.batch_slices import for_slices
from jaxfleet.runtime.memory_fit import Fit, Fitting
from jaxfleet.runtime.memory_report import StepMemory
from jaxfleet.runtime.step_tables import StepTables
from jaxfleet.runtime.transpile import over_gloo, transpile
from jaxfleet.strategy import DistributedStrategy, check_skips_no_rows


@dataclass(frozen=True)
class Variant:
    """A step compiled for one capture of the batch.

    Attributes:
        program: transpiled.
        dumps: record of every pass.
        lowered: compiled.
        metrics_tree: structure of its metrics.
        tables: the tables that it looks up; None without any.
        interface: mapping of pytrees to its variables.
        fit: result for a memory budget; None without a budget.
    """

    program: Program
    dumps: Record
    lowered: LoweredStep
    metrics_tree: Any
    interface: Interface
    tables: StepTables | None = None
    fit: Fit | None = None

    def holds(self, captured: Captured) -> AuxiliaryState | None:
        """Returns the auxiliary state of the step; None if there is none."""
        if not self.interface.beside and not own_state(self.program):
            return None
        return AuxiliaryState(captured, self.program, self.interface, self.lowered)


class Variants:
    """Compiles the step for any number of rows."""

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
        captured = for_slices(self._captured.at(rows), rows, len(self._devices))
        if captured.rows not in self._made:
            made = self._make(captured)
            if self._strategy.memory_budget is not None:
                fit = self._fit(self._memory(captured, made, rows), self._strategy.memory_budget)
                made = self._make(captured, fit) if fit.passes else replace(made, fit=fit)
                self._cache.keep(self._memory(captured, made, rows).runs)
            self._made[captured.rows] = made
        return self._made[captured.rows]

    def memory(self, rows: int) -> StepMemory:
        """Returns the step's memory use for batches of this size.

        Raises:
            StrategyError: the step looks up tables.
        """
        captured = for_slices(self._captured.at(rows), rows, len(self._devices))
        return self._memory(captured, self.at(rows), rows)

    def _make(self, captured: Captured, fit: Fit | None = None) -> Variant:
        described = "tables" in captured.program.attrs
        if described:
            _check_for_tables(self._strategy)
        passes = collective_pipeline(
            self._strategy,
            devices=len(self._devices),
            over_gloo=over_gloo(self._devices),
            on_cpus=all(device.platform == "cpu" for device in self._devices),
            tables=described,
            loss=_loss(self._strategy, captured),
            outer=_outer(self._strategy, captured),
            slicing=slicing_passes(captured.program, len(self._devices)),
        )
        passes += fit.passes if fit is not None else ()
        program, record = transpile(captured.program, passes, dump_dir=self._dump_dir)
        metrics = final_variables(
            program, captured.metrics
        )  # `memory_optimize` may have moved some
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

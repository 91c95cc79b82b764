"""Compiled variants of a step: one for all batch sizes, or one for each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxfleet.analysis.memory.final_variables import final_variables
from jaxfleet.analysis.sharding import own_state
from jaxfleet.capture import Captured
from jaxfleet.capture.trace import trace_outer
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Kind, Program
from jaxfleet.lower import Interface, LoweredStep, lower_step
from jaxfleet.lower.blocks import ExecutableCache
from jaxfleet.passes.pipelines import collective_pipeline, slicing_passes
from jaxfleet.pipeline import Record
from jaxfleet.report import History, Measured
from jaxfleet.runtime.explain import explain
from jaxfleet.runtime.memory_fit import Fit, Fitting
from jaxfleet.runtime.memory_report import StepMemory
from jaxfleet.runtime.step_state import AuxiliaryState, beside
from jaxfleet.runtime.step_view import add_to_dump, step_history
from jaxfleet.runtime.transpile import for_slices, over_gloo, transpile
from jaxfleet.strategy import DistributedStrategy, check_skips_no_rows
from jaxfleet.tables.access import LocalTables, TableAccess
from jaxfleet.tables.host_lookup import HostTables, Joined, on_device, row_count


@dataclass(frozen=True)
class StepTables:
    """A program's tables, and the part of it that devices run."""

    host: HostTables  # the host's work
    program: Program  # for devices
    # Of that program: the batch without keys, followed by the host's inputs; the metrics, followed
    # by the host's outputs
    interface: Interface
    _names: tuple[str, ...]

    @classmethod
    def of(cls, program: Program, interface: Interface) -> "StepTables | None":
        """Returns the tables of a transpiled program, or None without any."""
        host = HostTables.of(program)
        if not host.lookups:
            return None
        made = on_device(program, host)
        known = {v.name for v in made.of_kind(Kind.DATA)}
        batch = [name for name in interface.batch if name in known]
        batch += [name for each in host.lookups for name in (each.rows, *each.index)]
        metrics = [*interface.metrics, *(x.gradient for x in host.lookups if x.gradient)]
        inside = replace(
            interface,
            batch=tuple(batch),
            metrics=tuple(metrics),
            batch_tree=jax.tree_util.tree_structure(batch),
            metrics_tree=jax.tree_util.tree_structure(metrics),
        )
        return cls(host, made, inside, interface.batch)

    def bring(self, access: LocalTables, data: Sequence[Any]) -> tuple[list[Any], Joined]:
        """Returns the device inputs for a batch's leaves, and its keys."""
        values = dict(zip(self._names, data, strict=True))
        arrays, _, joined = self.host.bring(access, values, frozen=access)
        values.update(arrays)
        return [values[name] for name in self.interface.batch], joined

    def types(self, data: Sequence[Any]) -> list[Any]:
        """Returns the types of the device inputs for a batch of unique keys."""
        values = dict(zip(self._names, data, strict=True))
        for each in self.host.lookups:
            shapes = [np.shape(values[name]) for name in each.keys]
            count = row_count(sum(map(math.prod, shapes)))
            values[each.rows] = jax.ShapeDtypeStruct((count, each.dim), np.float32)
            for name, shape in zip(each.index, shapes, strict=True):
                values[name] = jax.ShapeDtypeStruct(shape, np.int32)
        return [values[name] for name in self.interface.batch]

    def hand_over(self, access: TableAccess, joined: Joined, fetched: list[Any]) -> list[Any]:
        known = len(fetched) - sum(each.gradient is not None for each in self.host.lookups)
        gradients = iter(fetched[known:])
        for each in self.host.lookups:
            if each.gradient is not None:
                self.host.hand_over(access, each, joined, np.asarray(next(gradients)))
        return fetched[:known]


@dataclass(frozen=True)
class Variant:
    """A step compiled for one capture of the batch."""

    program: Program  # transpiled
    dumps: Record  # record of every pass
    lowered: LoweredStep  # compiled
    metrics_tree: Any  # structure of its metrics
    metrics: tuple[str, ...]  # names of their leaves
    interface: Interface  # mapping of pytrees to its variables
    tables: StepTables | None = None  # the tables that it looks up; None without any
    fit: Fit | None = None  # result for a memory budget; None without a budget

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
        self._captures: dict[int | None, Captured] = {}  # of which each was made
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
            self._captures[captured.rows] = captured
            if made.dumps.folder is not None:
                add_to_dump(made.dumps.folder, self._history(captured.rows))
        return self._made[captured.rows]

    def histories(
        self, ran: Sequence[Variant] = (), times: Mapping[int, Measured | None] | None = None
    ) -> list[History]:
        """Returns the history of every variant that was compiled, in that order.

        Those that `ran` have XLA's memory, and `times` are measurements by variant.
        """
        found = []
        for made in list(self._made.values()):
            has_run = any(made is variant for variant in ran)
            found.append(self.history_of(made, (times or {}).get(id(made)), has_run=has_run))
        return found

    def history_of(
        self, made: Variant, times: Measured | None = None, *, has_run: bool = True
    ) -> History:
        """Returns the history of a variant; one that has run has XLA's memory, which it knows."""
        rows = next(rows for rows, variant in self._made.items() if variant is made)
        history = replace(self._history(rows), measured=times)
        if not has_run or made.tables is not None:
            return history
        captured = self._captures[rows]
        peak = self._memory(captured, made, captured.signature.rows).peak().bytes
        before = None if made.fit is None else int(made.fit.before)
        return replace(history, xla_bytes=peak, xla_bytes_before=before)

    def programs(self) -> list[tuple[str, Program]]:
        """Returns the program of every variant that was compiled, with its batch size in words."""
        return [(_label(rows), variant.program) for rows, variant in self._made.items()]

    def _history(self, rows: int | None) -> History:
        captured, made = self._captures[rows], self._made[rows]
        explained = explain(captured, self._strategy, self._devices, made.program, made.dumps)
        return step_history(
            captured, self._strategy, made.dumps, explained, fit=made.fit, label=_label(rows)
        )

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
        tree, names = captured.metrics_tree, captured.metrics
        return Variant(program, record, lowered, tree, names, interface, tables, fit)

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
        leaves = [leaf.shape for leaf in captured.signature.batch]
        shapes = [(rows, *shape[1:]) if shape else () for shape in leaves]
        return StepMemory(
            variant.program,
            self._devices[0],
            shapes,
            captured,
            variant.interface,
            variant.lowered,
            self._devices,
        )


def _label(rows: int | None) -> str:
    return "any batch size" if rows is None else f"batch of {rows}"


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

"""Runs a compiled program within a memory budget, planned for the shapes of its feeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxfleet.analysis.memory.final_variables import final_variables
from jaxfleet.analysis.memory.profile import size_text
from jaxfleet.ir import Operands, Operator, Program
from jaxfleet.lower import ExecutableCache
from jaxfleet.lower.function import bind_sizes
from jaxfleet.lower.host_transfer import device_dtype
from jaxfleet.lower.staged import StagedStep
from jaxfleet.lower.staged_sharding import layout_for
from jaxfleet.passes import ShapeReads
from jaxfleet.runtime.compiled_program import CompiledProgram, prepare, run_by_name, says_cut
from jaxfleet.runtime.memory_fit import Fit, Fitting
from jaxfleet.runtime.memory_report import DeviceMemory, MemoryReport, report_of

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ProgramMemory(DeviceMemory):
    """Memory use of a program on one device, for feeds of these shapes.

    Its last operator lists the fetches.
    """

    names: tuple[str, ...]  # the fetched values
    cache: ExecutableCache  # of executables

    @cached_property
    def prepared(self) -> CompiledProgram:
        """The program as one function, whether it is cut or not."""
        return prepare(self.program, self.names)

    @property
    def fetched(self) -> tuple[str, ...]:
        return final_variables(self.program, self.names)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return bind_sizes(zip(self.prepared.data, self.shapes, strict=True))

    @cached_property
    def function(self) -> Any:
        """The program in executables if it is cut, or as one."""
        ready = self.prepared
        if not says_cut(self.program):
            return ready.function
        return StagedStep(
            self.program,
            given=tuple(v.name for v in ready.state if v.name in ready.donated),
            kept=tuple(v.name for v in ready.state if v.name not in ready.donated),
            data=tuple(v.name for v in ready.data),
            written=ready.written,
            fetched=self.fetched,
            layout=layout_for((self.device,), {}),
            cache=self.cache,
        )

    def compiled(self) -> Any:
        ready = self.prepared
        state = {v.name: _type_of(v.dtype, v.shape) for v in ready.state}
        given = {name: state.pop(name) for name in list(state) if name in ready.donated}
        data = {v.name: _type_of(v.dtype, s) for v, s in zip(ready.data, self.shapes, strict=True)}
        with jax.default_device(self.device):
            return ready.function.lower(given, state, data).compile()


@dataclass(frozen=True)
class Fitted:
    """The result of the search for a budget, and the memory use of the chosen program."""

    fit: Fit
    after: ProgramMemory

    def report(self) -> MemoryReport:
        return report_of(self.after, self.fit)


@dataclass
class WithinBudget:
    """A compiled program's function that fits a budget, planned at the first feed of each shape."""

    prepared: CompiledProgram  # the program
    names: tuple[str, ...]  # the fetched values
    # An int of bytes, or a float fraction of the program's peak; None for the least without
    # recomputation
    budget: float | None
    device: Any  # where it runs
    log: Callable[[str], None] | None = None  # receives a description of each result
    # By the shapes of the feeds, in order of first use
    fitted: dict[Shapes, Fitted] = field(default_factory=dict)
    _cache: ExecutableCache = field(default_factory=ExecutableCache)

    def __call__(
        self, given: Mapping[str, Any], kept: Mapping[str, Any], data: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Runs the program once; returns the fetches and the new state.

        Raises:
            StrategyError: it cannot be made to fit; the error names the least possible budget.
        """
        shapes = tuple(np.shape(data[v.name]) for v in self.prepared.data)
        if shapes not in self.fitted:
            self.fitted[shapes] = self._fit(shapes)
        run = self.fitted[shapes].after.function
        if isinstance(run, StagedStep):
            return run_by_name(run, given, kept, data)
        fetched, written = run(given, kept, data)
        return list(fetched), dict(written)

    def _fit(self, shapes: Shapes) -> Fitted:
        program = ShapeReads().run(with_fetch(self.prepared.program, self.names))
        before = ProgramMemory(program, self.device, shapes, self.names, self._cache)
        fitting = Fitting(before, lambda made: replace(before, program=made))
        if self.budget is None:
            fit = fitting.least(exact=self.log is not None)
        else:
            fit = fitting.to(self.budget)
        after = before
        if fit.passes:
            after = replace(before, program=fitting.program(fit.passes))
        others = (run for other in self.fitted.values() for run in other.after.runs)
        self._cache.keep([*after.runs, *others])
        if self.log is not None:
            self.log(_in_words(program.name, fit, after))
        return Fitted(fit, after)


def _in_words(name: str, fit: Fit, after: ProgramMemory) -> str:
    taken = fit.before if fit.after is None else fit.after.bytes
    what = f"'{name}' takes {size_text(taken)} besides its state, feeds and fetches"
    return f"{what}, {size_text(fit.before)} as it was, in {after.executables[0]} executables"


def with_fetch(program: Program, names: Sequence[str]) -> Program:
    """Returns a program that lists its fetches, for the passes."""
    wanted = final_variables(program, names)
    if not wanted:
        return program
    fetch = Operator("fetch", Operands.of(*wanted))
    return program.with_block(program.root.with_ops((*program.root.ops, fetch)))


def within_budget(
    prepared: CompiledProgram,
    names: tuple[str, ...],
    budget: float | None,
    device: Any,
    log: Callable[[str], None] | None = None,
) -> CompiledProgram:
    """Returns a compiled program for one device whose function fits a budget.

    The arguments are the attributes of `WithinBudget`; the device is by default JAX's.
    """
    chosen = device if device is not None else jax.devices()[0]
    return replace(prepared, function=WithinBudget(prepared, names, budget, chosen, log))


def _type_of(dtype: str, shape: Sequence[Any]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), device_dtype(dtype))

"""Runs a program that was prepared within a budget of memory, planned for the shapes it is fed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxfleet.analysis.memory import Curve, curve_of
from jaxfleet.analysis.memory.curve import size_text
from jaxfleet.analysis.memory.reused import held_by
from jaxfleet.ir import Operands, Operator, Program
from jaxfleet.lower import ExecutableCache
from jaxfleet.lower.host_arrays import device_dtype
from jaxfleet.lower.moves import host_memory_is_apart
from jaxfleet.lower.part_layout import layout_for
from jaxfleet.lower.part_step import PartStep
from jaxfleet.lower.peak import Peak, count_runs, peak_of_one
from jaxfleet.lower.sizes import bind_sizes
from jaxfleet.passes import ShapeReads
from jaxfleet.runtime.memory_fit import Fit, Fitting
from jaxfleet.runtime.memory_report import MemoryReport
from jaxfleet.runtime.prepared import Prepared, prepare

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ProgramMemory:
    """What a program takes on one device, fed arrays of these shapes.

    Attributes:
        program: it; an operator at its end says what is fetched.
        names: the values that are fetched.
        shapes: of what is fed, in the order of the data that it reads.
        device: what it runs on.
        cache: where executables are kept.
    """

    program: Program
    names: tuple[str, ...]
    shapes: Shapes
    device: Any
    cache: ExecutableCache

    @cached_property
    def prepared(self) -> Prepared:
        """The program as one function, whether it is cut or not."""
        return prepare(self.program, self.names)

    @property
    def host_is_apart(self) -> bool:
        """Tells whether pinned memory of the host is other memory than the device's."""
        return host_memory_is_apart(self.device)

    @property
    def fetched(self) -> tuple[str, ...]:
        """What is read when the program is over."""
        return held_by(self.program, self.names)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """A number for every letter."""
        return bind_sizes(zip(self.prepared.data, self.shapes, strict=True))

    @cached_property
    def in_parts(self) -> PartStep | None:
        """The program in executables; None where it is one."""
        if not any(op.type == "cut" for op in self.program.root.ops):
            return None
        ready = self.prepared
        return PartStep(
            self.program,
            given=tuple(v.name for v in ready.state if v.name in ready.donated),
            kept=tuple(v.name for v in ready.state if v.name not in ready.donated),
            data=tuple(v.name for v in ready.data),
            written=ready.written,
            fetched=self.fetched,
            layout=layout_for((self.device,), {}),
            cache=self.cache,
        )

    def curve(self) -> Curve:
        """Returns the bytes at each operator, before xla merges operators."""
        return curve_of(self.program, self.sizes, keep=self.fetched)

    def peak(self) -> Peak:
        """Returns the peak as xla says it; compiles what is not compiled."""
        if self.in_parts is not None:
            return self.in_parts.peak(self.shapes)
        ready = self.prepared
        state = {v.name: _type_of(v.dtype, v.shape) for v in ready.state}
        given = {name: state.pop(name) for name in list(state) if name in ready.donated}
        data = {v.name: _type_of(v.dtype, s) for v, s in zip(ready.data, self.shapes, strict=True)}
        with jax.default_device(self.device):
            return peak_of_one(ready.function.lower(given, state, data).compile())

    @property
    def executables(self) -> tuple[int, int]:
        """How many executables run, and how many of them differ."""
        return count_runs(self.runs)

    @property
    def runs(self) -> Sequence[Any]:
        """The jitted functions that run one after another."""
        if self.in_parts is None:
            return [self.prepared.function]
        return [part.run for part in self.in_parts.at(self.shapes)]


@dataclass(frozen=True)
class Fitted:
    """A program that fits a budget.

    Attributes:
        fit: what was found.
        before: what the program takes as it is.
        after: what it takes as it runs.
    """

    fit: Fit
    before: ProgramMemory
    after: ProgramMemory

    def report(self) -> MemoryReport:
        """Returns what it takes, before and after."""
        before = self.before.curve()
        after = self.after.curve() if self.fit.passes else before
        peak = self.after.peak().bytes
        return MemoryReport(before, self.fit.before, after, peak, self.after.executables, self.fit)


@dataclass
class WithinBudget:
    """A prepared program's function that fits a budget, planned when it first is fed such shapes.

    Attributes:
        prepared: the program.
        names: the values that are fetched.
        budget: in bytes where it is an int, of the program's peak where it is a float; None for
            the least that it takes when nothing is computed again.
        device: what it runs on.
        log: takes a description of what was found.
        fitted: by the shapes that were fed, in the order in which they first came.
    """

    prepared: Prepared
    names: tuple[str, ...]
    budget: float | None
    device: Any
    log: Callable[[str], None] | None = None
    fitted: dict[Shapes, Fitted] = field(default_factory=dict)
    _cache: ExecutableCache = field(default_factory=ExecutableCache)

    def __call__(
        self, given: Mapping[str, Any], kept: Mapping[str, Any], data: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Runs the program once; returns what is fetched, and the new state.

        Raises:
            StrategyError: it cannot be made to fit; the error says the least that it takes.
        """
        shapes = tuple(np.shape(data[v.name]) for v in self.prepared.data)
        if shapes not in self.fitted:
            self.fitted[shapes] = self._fit(shapes)
        memory = self.fitted[shapes].after
        run = memory.in_parts
        if run is None:
            fetched, written = memory.prepared.function(given, kept, data)
            return list(fetched), dict(written)
        values = (
            [given[name] for name in run.given],
            [kept[name] for name in run.kept],
            [data[name] for name in run.data],
        )
        new, fetched = run(*values)
        return fetched, dict(zip(run.written, new, strict=True))

    def _fit(self, shapes: Shapes) -> Fitted:
        program = ShapeReads().run(with_fetch(self.prepared.program, self.names))
        before = ProgramMemory(program, self.names, shapes, self.device, self._cache)
        fitting = Fitting(before, lambda made: replace(before, program=made))
        if self.budget is None:
            fit = fitting.least(exact=self.log is not None)
        else:
            fit = fitting.to(self.budget)
        made = program
        for pass_ in fit.passes:
            made = pass_.run(made)
        after = replace(before, program=made) if fit.passes else before
        used = [*after.runs, *(run for other in self.fitted.values() for run in other.after.runs)]
        self._cache.keep(used)
        if self.log is not None:
            self.log(_in_words(program.name, fit, after))
        return Fitted(fit, before, after)


def _in_words(name: str, fit: Fit, after: ProgramMemory) -> str:
    taken = fit.before if fit.after is None else fit.after.bytes
    what = f"'{name}' takes {size_text(taken)} besides its state, feeds and fetches"
    return f"{what}, {size_text(fit.before)} as it was, in {after.executables[0]} executables"


def with_fetch(program: Program, names: Sequence[str]) -> Program:
    """Returns a program that says what is read of it when it is over, so that passes know."""
    wanted = held_by(program, names)
    if not wanted:
        return program
    fetch = Operator("fetch", Operands.of(*wanted))
    return program.with_block(program.root.with_ops((*program.root.ops, fetch)))


def within_budget(
    prepared: Prepared,
    names: tuple[str, ...],
    budget: float | None,
    device: Any,
    log: Callable[[str], None] | None = None,
) -> Prepared:
    """Returns a prepared program whose function fits a budget.

    Args:
        prepared: it, for one device.
        names: the values that are fetched.
        budget: in bytes where it is an int, of the program's peak where it is a float; None for
            the least that it takes when nothing is computed again.
        device: what it runs on; where JAX runs, unless given.
        log: takes a description of what was found.
    """
    chosen = device if device is not None else jax.devices()[0]
    return replace(prepared, function=WithinBudget(prepared, names, budget, chosen, log))


def _type_of(dtype: str, shape: Sequence[Any]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), device_dtype(dtype))

"""What a trainer's program takes in memory, and how it is made to fit a budget.

A trainer's program is executables with messages between them. Counted is what these executables
leave lying for later ones, and what the running one takes; not the messages' own copies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jaxfleet.analysis.memory import Curve, curve_of
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Program
from jaxfleet.lower import ExecutableCache
from jaxfleet.lower.moves import host_memory_is_apart
from jaxfleet.lower.peak import Peak, count_runs, peak_of
from jaxfleet.lower.segmented import Part
from jaxfleet.lower.segments import rows_of
from jaxfleet.lower.trainer_parts import trainer_parts
from jaxfleet.pipeline import Record
from jaxfleet.runtime.job_programs import JobPrograms
from jaxfleet.runtime.memory_fit import Fitting
from jaxfleet.runtime.strategy import DistributedStrategy
from jaxfleet.runtime.transpile import transpile


@dataclass(frozen=True)
class TrainerMemory:
    """A trainer's program, fed so many rows.

    Attributes:
        program: it.
        sizes: a number for every letter.
        cache: where executables are kept.
    """

    program: Program
    sizes: Mapping[str, int]
    cache: ExecutableCache

    @property
    def fetched(self) -> tuple[str, ...]:
        """What is read when the step is over."""
        fetches = (op.reads for op in reversed(self.program.root.ops) if op.type == "fetch")
        return next(fetches, ())

    @cached_property
    def _parts(self) -> tuple[Part, ...]:
        return trainer_parts(self.program, self.sizes, self.fetched, self.cache)

    @property
    def host_is_apart(self) -> bool:
        """Tells whether pinned memory of the host is other memory than the device's."""
        return host_memory_is_apart(jax.devices()[0])

    def curve(self) -> Curve:
        """Returns the bytes at each operator, before xla merges operators."""
        return curve_of(self.program, self.sizes, keep=self.fetched)

    def peak(self) -> Peak:
        """Returns the peak as xla says it; compiles what is not compiled."""
        return peak_of(self._parts, self.fetched)

    @property
    def executables(self) -> tuple[int, int]:
        """How many executables a step runs, and how many of them differ."""
        return count_runs([part.run for part in self._parts])

    @property
    def runs(self) -> list[Any]:
        """The jitted functions that a step runs one after another."""
        return [part.run for part in self._parts]


def memory_of(
    job: JobPrograms, strategy: DistributedStrategy, rows: int, cache: ExecutableCache
) -> TrainerMemory:
    """Returns what a job's trainer takes.

    Args:
        job: its programs.
        strategy: how the step is distributed.
        rows: of the example's batch.
        cache: where executables are kept.

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
    own = rows if job.is_whole or strategy.batch == "local" else rows // job.trainers
    return TrainerMemory(job.trainer, rows_of(job.trainer, own), cache)


def fitting(
    programs: Callable[[Program], JobPrograms],
    strategy: DistributedStrategy,
    rows: int,
    cache: ExecutableCache,
) -> Callable[[Program], JobPrograms]:
    """Returns what makes a job's programs, the trainer's such that it fits the strategy's budget.

    Args:
        programs: makes them as they are.
        strategy: how the step is distributed.
        rows: of the example's batch.
        cache: where executables are kept.
    """
    budget = strategy.memory_budget
    if budget is None:
        return programs

    def make(program: Program) -> JobPrograms:
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

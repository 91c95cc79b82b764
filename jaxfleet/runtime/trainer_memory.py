"""Memory use of a trainer's program, and its fit to a budget.

A trainer's program is executables with messages between them. Counted are the values that these
executables leave for later ones, and the use of the running one; not the messages' own copies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax

from jaxfleet.analysis.memory import MemoryProfile, memory_profile
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Program
from jaxfleet.lower import ExecutableCache
from jaxfleet.lower.host_transfer import host_memory_is_apart
from jaxfleet.lower.partition import rows_of
from jaxfleet.lower.staged import Peak, Stage, count_runs, peak_of
from jaxfleet.lower.staged_trainer import trainer_stages
from jaxfleet.pipeline import Record
from jaxfleet.runtime.memory_fit import Fitting
from jaxfleet.runtime.transpile import transpile
from jaxfleet.strategy import DistributedStrategy

if TYPE_CHECKING:  # every step reports its memory, and only jobs with servers need their programs
    from jaxfleet.runtime.pserver_job import JobPrograms


@dataclass(frozen=True)
class TrainerMemory:
    """A trainer's program, for one number of rows.

    Attributes:
        program: the program.
        sizes: values of the symbolic sizes.
        cache: of executables.
    """

    program: Program
    sizes: Mapping[str, int]
    cache: ExecutableCache

    @property
    def fetched(self) -> tuple[str, ...]:
        fetches = (op.reads for op in reversed(self.program.root.ops) if op.type == "fetch")
        return next(fetches, ())

    @cached_property
    def _parts(self) -> tuple[Stage, ...]:
        return trainer_stages(self.program, self.sizes, self.fetched, self.cache)

    @property
    def host_is_apart(self) -> bool:
        return host_memory_is_apart(jax.devices()[0])

    def curve(self) -> MemoryProfile:
        return memory_profile(self.program, self.sizes, keep=self.fetched)

    def peak(self) -> Peak:
        return peak_of(self._parts, self.fetched)

    @property
    def executables(self) -> tuple[int, int]:
        return count_runs([part.run for part in self._parts])

    @property
    def runs(self) -> list[Any]:
        return [part.run for part in self._parts]


def memory_of(
    job: "JobPrograms", strategy: DistributedStrategy, rows: int, cache: ExecutableCache
) -> TrainerMemory:
    """Returns the memory use of a job's trainer for the example's number of rows.

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
    programs: "Callable[[Program], JobPrograms]",
    strategy: DistributedStrategy,
    rows: int,
    cache: ExecutableCache,
) -> "Callable[[Program], JobPrograms]":
    """Wraps `programs` to fit the trainer's program to the strategy's budget.

    `rows` are those of the example's batch.
    """
    budget = strategy.memory_budget
    if budget is None:
        return programs

    def make(program: Program) -> "JobPrograms":
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

"""Programs lowered for execution, cached by program version, feeds and fetches."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from jaxfleet.analysis.memory.final_variables import check_fed
from jaxfleet.cluster import joined, not_joined
from jaxfleet.errors import ProgramError
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import KeyedCache, Program
from jaxfleet.fluid.framework.sequence_lengths import nested_data, ragged_data, with_lengths
from jaxfleet.fluid.framework.to_ir import ir_program
from jaxfleet.fluid.framework.variable import Parameter
from jaxfleet.fluid.lowering.feeding import Rule
from jaxfleet.fluid.lowering.lod_values import lengths_to_fetch
from jaxfleet.fluid.lowering.memory import MemoryBudget, with_recomputation
from jaxfleet.fluid.lowering.rewrites import RUN, close_sub_blocks, with_seeds
from jaxfleet.fluid.transpiler.pserver_job import SPECS
from jaxfleet.ir import Kind
from jaxfleet.ir import Program as IrProgram
from jaxfleet.ops.jax_adapter import numpy_dtype
from jaxfleet.ops.user_frames import warn_at_caller
from jaxfleet.passes import Donate
from jaxfleet.runtime.compiled_program import CompiledProgram, prepare
from jaxfleet.runtime.memory_budget import within_budget
from jaxfleet.runtime.program_timing import FirstRunTimer, timed
from jaxfleet.runtime.transpile import DumpSeries, begin_series, run_passes
from jaxfleet.tables import TableSpec


def warn_not_joined(program: Program) -> None:
    """Warns if a program with updates runs on this rank alone, without any exchange.

    Either the collective fleet rewrote a copy, `fleet.main_program`, and the script runs its own
    program; or several processes run the script, but nothing makes its program distributed.
    """
    updates = next((op for op in program.global_block().ops if _updates(op)), None)
    if updates is None:
        return
    here, others = joined(), not_joined()
    if here is not None:
        who = f"this is rank {here.rank} of {here.size}"
        way = "run fleet.main_program, or CompiledProgram(program).with_data_parallel() with"
        way = f"{way} build_strategy.num_trainers = {here.size} and trainer_id = {here.rank}"
    elif others is not None:
        who, way = others, "make it by the collective fleet, or by DistributeTranspiler in mode"
        way = f"{way} 'nccl2' or 'collective', whose startup program joins the others"
    else:
        return
    name = updates.input("Param")[0]
    what = f"the program that runs updates '{name}' by this process's rows alone"
    warn_at_caller(f"{who}, and {what}: {way}")


def _updates(op: Operator) -> bool:
    return op._is_optimize_op() and bool(op.input("Grad"))


# Until a transpiler has run, `is_distributed` has no effect: the table is an ordinary parameter, as
# in tests of small nets. In fluid a variable cannot be longer than a message.
_MOST_BYTES = 1 << 31


def refuse_whole_tables(program: Program, runs: IrProgram) -> None:
    """Raises ProgramError if a run writes a distributed table of more than 2 GiB in one process.

    `runs` is the part of the program to run.
    """
    for table in program.all_parameters():
        if table.is_distributed:
            _refuse_whole(table, runs)


def _refuse_whole(table: Parameter, runs: IrProgram) -> None:
    found = runs.lookup(table.name)
    sizes = [size for size in found.shape if isinstance(size, int)]
    size = math.prod(sizes) * numpy_dtype(found.dtype).itemsize
    begins = next((op for op in runs.root.ops if table.name in op.writes), None)
    if begins is None or size <= _MOST_BYTES:
        return
    what = (
        f"'{table.name}' is a distributed table, and '{begins.type}' makes all its rows here: "
        f"{size / (1 << 30):,.1f} GiB"
    )
    hint = (
        "let servers hold them: fluid.DistributeTranspiler().transpile(...), or "
        "fluid.distributed.DownpourSGD and train_from_dataset, before the startup program runs; "
        "a parameter of this process is is_distributed=False"
    )
    raise ProgramError(what, op=begins, hint=hint)


Names: TypeAlias = tuple[str, ...]
_Key: TypeAlias = tuple[Names, Names, MemoryBudget | None]


@dataclass(frozen=True)
class CachedProgram:
    """A program prepared for given feeds and fetches."""

    prepared: CompiledProgram  # the program, compiled at its first run
    state: Names  # names that it reads from the scope without writing them
    given: Names  # names whose memory is donated to the run
    data: tuple[tuple[str, Rule], ...]  # fed names, with their rules
    # fed names that go into the scope before the run, with their rules
    puts: tuple[tuple[str, Rule], ...]
    unknown: Names  # fed names that the program does not declare
    has_sequences: bool  # some inputs are sequences, which are fed as two arrays
    draws: bool  # random operators in it need the run number
    lengths: Names = ()  # of computed sequences, which are fetched in addition


class ProgramCache:
    """Caches plans until their programs change or are garbage-collected.

    `device` is called only for programs with a memory budget.
    """

    def __init__(self, device: Callable[[], Any]) -> None:
        self._device = device
        self._known = KeyedCache[_Key, CachedProgram]()

    def find(
        self, program: Program, fed: Names, fetch: Names, budget: MemoryBudget | None = None
    ) -> CachedProgram:
        """Returns the plan for the current version of a program.

        Raises:
            FeedError: a fetched variable does not exist.
            ProgramError: it initializes a distributed table that is too large for one process.
        """
        plans = self._known.get(program)
        plan = plans.get((fed, fetch, budget))
        if plan is None:
            series = begin_series()
            plan = _made(program, fed, fetch, series)
            if budget is not None:
                fitted = budget.fitted(plan.prepared, fetch + plan.lengths, self._device())
                plan = replace(plan, prepared=fitted)
            elif program._is_mem_optimized:
                log = print if program._prints_memory else None
                wanted = fetch + plan.lengths
                fitted = within_budget(plan.prepared, wanted, None, self._device(), log)
                plan = replace(plan, prepared=fitted)
            if (fed or fetch) and (timer := FirstRunTimer.of(series)) is not None:
                function = timed(plan.prepared.function, timer)
                plan = replace(plan, prepared=replace(plan.prepared, function=function))
            plans[fed, fetch, budget] = plan
        return plan

    def clear(self) -> None:
        self._known.clear()


def _made(program: Program, fed: Names, fetch: Names, series: DumpSeries | None) -> CachedProgram:
    declared = program.global_block().vars
    known = [name for name in fed if name in declared]
    lengths = lengths_to_fetch(program, fetch)
    wanted = fetch + lengths
    made = with_recomputation(runnable(program, known), wanted, series)
    is_startup = not (fed or fetch)  # most likely, and nothing to look at
    made = run_passes(made, [Donate()], series=None if is_startup else series)
    refuse_whole_tables(program, made)
    warn_not_joined(program)
    prepared = prepare(made, wanted)
    read = [v.name for v in prepared.data if v.name in declared]
    return CachedProgram(
        prepared,
        tuple(v.name for v in prepared.state if v.name not in prepared.donated),
        tuple(v.name for v in prepared.state if v.name in prepared.donated),
        tuple((name, Rule.of(declared[name])) for name in read),
        tuple((name, Rule.of(declared[name])) for name in known if declared[name].persistable),
        tuple(name for name in fed if name not in declared),
        bool(ragged_data(program) or nested_data(program)),
        any(v.name == RUN for v in prepared.data),
        lengths,
    )


def runnable(program: Program, fed: Iterable[str] = ()) -> IrProgram:
    """Converts a program to the IR as executors run it.

    Random operators get their seeds and the run number, operators on sequences their lengths; a
    computed variable that is fed becomes data.
    """
    made = _without_tables(_with_data(ir_program(program), fed))
    return close_sub_blocks(with_seeds(with_lengths(made, program), program.random_seed))


def _without_tables(program: IrProgram) -> IrProgram:
    """Removes the initialization of distributed tables from a server's startup program.

    Their rows, which may exceed the memory, are created at their first lookup.
    """
    texts = program.attrs.get(SPECS, ())
    if not texts or program.attrs.get("role") != "pserver":
        return program
    assert isinstance(texts, tuple)
    names = {TableSpec.from_text(str(text)).name for text in texts}
    kept = [op for op in program.root.ops if names.isdisjoint(op.writes)]
    return program.with_block(program.root.with_ops(kept))


def _with_data(program: IrProgram, fed: Iterable[str]) -> IrProgram:
    inner = [name for name in fed if name in program.root.variables]
    check_fed(program, inner)
    if not inner:
        return program
    moved = {n: replace(program.root.variables[n], kind=Kind.DATA) for n in inner}
    kept = {n: v for n, v in program.root.variables.items() if n not in moved}
    root = replace(program.root, variables=kept)
    variables = {**program.variables, **moved}
    return replace(program, variables=variables, blocks=(root, *program.blocks[1:]))

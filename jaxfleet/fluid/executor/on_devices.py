"""On which devices of this process, or of all ranks, a program runs."""

from typing import Any

from jaxfleet.fluid.compiler.compiled_program import CompiledProgram
from jaxfleet.fluid.compiler.replicas import Replicas
from jaxfleet.fluid.executor.ranks import RankRuns, local_ranks, rank_count
from jaxfleet.fluid.memory_budget import refused_budget
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.pserver import refuse_several_devices
from jaxfleet.runtime.scope import Scope


def several_devices(
    program: Program | CompiledProgram, runs: Program, scope: Scope, place: Any, ranks: RankRuns
) -> Replicas | RankRuns | None:
    """Returns what runs a program on several devices; None where it runs on one.

    Args:
        program: what a script gave.
        runs: the program in it.
        scope: where the state is.
        place: the Executor's.
        ranks: runs programs of ranks.

    Raises:
        StrategyError: it has a budget of memory, which only a program on one device heeds.
    """
    if isinstance(program, CompiledProgram):
        program._compile(scope, place)
        replicas = program._replicas
        if replicas is not None and not replicas.is_one:
            refuse_several_devices(runs)
            return replicas
        if replicas is not None:
            replicas.count()
        if program._memory_budget is not None and rank_count(runs) > 1:
            raise refused_budget("a rank's program")
    return ranks if rank_count(runs) > 1 else None


def device_count(
    program: Program | CompiledProgram, runs: Program, scope: Scope, place: Any
) -> int:
    """Returns on how many devices of this process a program runs; arguments as above.

    Each of them takes a batch of a loader.
    """
    if isinstance(program, CompiledProgram):
        program._compile(scope, place)
        if program._replicas is not None:
            return len(program._replicas.places)
    return local_ranks(runs)

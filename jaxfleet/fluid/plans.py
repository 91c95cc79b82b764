"""Programs made ready to run, once for each version of a program and what is fed and fetched."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from jaxfleet.analysis.memory.reused import check_fed
from jaxfleet.fluid.alone import warn_alone
from jaxfleet.fluid.closing import closed
from jaxfleet.fluid.drawing import RUN, with_draws
from jaxfleet.fluid.feeding import Rule
from jaxfleet.fluid.memory_budget import MemoryBudget
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.ragged import ragged_data, with_lengths
from jaxfleet.fluid.ragged_values import lengths_to_fetch
from jaxfleet.fluid.recomputing import recomputed
from jaxfleet.fluid.to_ir import ir_program
from jaxfleet.fluid.transpiler.table_spec import SPECS
from jaxfleet.fluid.versions import PerVersion
from jaxfleet.fluid.whole_tables import refuse_whole_tables
from jaxfleet.ir import Kind
from jaxfleet.ir import Program as IrProgram
from jaxfleet.passes import Donate
from jaxfleet.runtime.dump_series import begin_series
from jaxfleet.runtime.prepared import Prepared, prepare
from jaxfleet.runtime.within_budget import within_budget
from jaxfleet.tables import TableSpec

Names: TypeAlias = tuple[str, ...]
_Key: TypeAlias = tuple[Names, Names, MemoryBudget | None]


@dataclass(frozen=True)
class Plan:
    """A program ready to run for what is fed and fetched.

    Attributes:
        prepared: it, compiled when it first runs.
        state: the names that it reads from the scope and only reads.
        given: those whose memory the run takes.
        data: the names that are fed, with how.
        puts: those that go into the scope before the run, with how.
        unknown: those that the program does not have.
        has_sequences: some that it has are of unequal lengths, which are fed as two arrays.
        draws: random operators in it want the number of the run.
        lengths: of sequences that it makes, which are fetched beside what is asked for.
    """

    prepared: Prepared
    state: Names
    given: Names
    data: tuple[tuple[str, Rule], ...]
    puts: tuple[tuple[str, Rule], ...]
    unknown: Names
    has_sequences: bool
    draws: bool
    lengths: Names = ()


class Plans:
    """Keeps plans as long as their programs live and stay what they are.

    Args:
        device: what runs them, which only those with a budget of memory ask for.
    """

    def __init__(self, device: Callable[[], Any]) -> None:
        self._device = device
        self._known: PerVersion[dict[_Key, Plan]] = PerVersion(lambda _: {})

    def find(
        self, program: Program, fed: Names, fetch: Names, budget: MemoryBudget | None = None
    ) -> Plan:
        """Returns the plan for a program as it is now.

        Args:
            program: it.
            fed: the names that are fed.
            fetch: the names that are fetched.
            budget: what it may take; None for whatever it takes.

        Raises:
            FeedError: something is fetched that the program does not have.
            ProgramError: it begins all rows of a distributed table that are too many for that.
        """
        plans = self._known.get(program)
        plan = plans.get((fed, fetch, budget))
        if plan is None:
            plan = _made(program, fed, fetch)
            if budget is not None:
                fitted = budget.fitted(plan.prepared, fetch + plan.lengths, self._device())
                plan = replace(plan, prepared=fitted)
            elif program._is_mem_optimized:
                log = print if program._prints_memory else None
                wanted = fetch + plan.lengths
                fitted = within_budget(plan.prepared, wanted, None, self._device(), log)
                plan = replace(plan, prepared=fitted)
            plans[fed, fetch, budget] = plan
        return plan

    def clear(self) -> None:
        """Lets all of them go."""
        self._known.clear()


def _made(program: Program, fed: Names, fetch: Names) -> Plan:
    declared = program.global_block().vars
    known = [name for name in fed if name in declared]
    lengths = lengths_to_fetch(program, fetch)
    wanted = fetch + lengths
    made = Donate().run(recomputed(runnable(program, known), wanted, begin_series()))
    refuse_whole_tables(program, made)
    warn_alone(program)
    prepared = prepare(made, wanted)
    read = [v.name for v in prepared.data if v.name in declared]
    return Plan(
        prepared,
        tuple(v.name for v in prepared.state if v.name not in prepared.donated),
        tuple(v.name for v in prepared.state if v.name in prepared.donated),
        tuple((name, Rule.of(declared[name])) for name in read),
        tuple((name, Rule.of(declared[name])) for name in known if declared[name].persistable),
        tuple(name for name in fed if name not in declared),
        bool(ragged_data(program)),
        any(v.name == RUN for v in prepared.data),
        lengths,
    )


def runnable(program: Program, fed: Iterable[str] = ()) -> IrProgram:
    """Returns a program in the IR as executors run it.

    Random operators get seeds of their own and the number of the run; operators on sequences get
    their lengths; what is fed in the place of a value that the program computes becomes data.
    """
    made = _without_tables(_with_data(ir_program(program), fed))
    return closed(with_draws(with_lengths(made, program), program.random_seed))


def _without_tables(program: IrProgram) -> IrProgram:
    """Leaves out of a server's startup program what begins all rows of a distributed table.

    Each is made when it is first looked up; there may be more of them than fit.
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

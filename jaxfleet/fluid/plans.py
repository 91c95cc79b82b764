"""Programs made ready to run, once for each version of a program and what is fed and fetched."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias
from weakref import WeakKeyDictionary

from jaxfleet.fluid.drawing import RUN, with_draws
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.ragged import with_lengths
from jaxfleet.fluid.to_ir import ir_program
from jaxfleet.ir import Kind
from jaxfleet.ir import Program as IrProgram
from jaxfleet.passes import Donate
from jaxfleet.runtime.prepared import Prepared, prepare

Names: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A program ready to run for what is fed and fetched.

    Attributes:
        prepared: it, compiled when it first runs.
        state: the names that it reads from the scope and only reads.
        given: those whose memory the run takes.
        data: the names that are fed.
        draws: random operators in it want the number of the run.
    """

    prepared: Prepared
    state: Names
    given: Names
    data: Names
    draws: bool


class Plans:
    """Keeps plans as long as their programs live and stay what they are."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Program, tuple[int, dict[tuple[Names, Names], Plan]]]
        self._known = WeakKeyDictionary()

    def find(self, program: Program, fed: Names, fetch: Names) -> Plan:
        """Returns the plan for a program as it is now.

        Args:
            program: it.
            fed: the names that are fed.
            fetch: the names that are fetched.

        Raises:
            FeedError: something is fetched that the program does not have.
        """
        known = self._known.get(program)
        if known is None or known[0] != program.version:
            known = self._known[program] = (program.version, {})
        plans = known[1]
        plan = plans.get((fed, fetch))
        if plan is None:
            plan = plans[fed, fetch] = _made(program, fed, fetch)
        return plan

    def clear(self) -> None:
        """Lets all of them go."""
        self._known.clear()


def _made(program: Program, fed: Names, fetch: Names) -> Plan:
    made = Donate().run(runnable(program, fed))
    prepared = prepare(made, fetch)
    return Plan(
        prepared,
        tuple(v.name for v in prepared.state if v.name not in prepared.donated),
        tuple(v.name for v in prepared.state if v.name in prepared.donated),
        tuple(v.name for v in prepared.data if v.name != RUN),
        any(v.name == RUN for v in prepared.data),
    )


def runnable(program: Program, fed: Iterable[str] = ()) -> IrProgram:
    """Returns a program in the IR as executors run it.

    Random operators get seeds of their own and the number of the run; operators on sequences get
    their lengths; what is fed in the place of a value that the program computes becomes data.
    """
    return with_draws(with_lengths(_with_data(ir_program(program), fed), program))


def _with_data(program: IrProgram, fed: Iterable[str]) -> IrProgram:
    inner = [name for name in fed if name in program.root.variables]
    if not inner:
        return program
    moved = {n: replace(program.root.variables[n], kind=Kind.DATA) for n in inner}
    kept = {n: v for n, v in program.root.variables.items() if n not in moved}
    root = replace(program.root, variables=kept)
    variables = {**program.variables, **moved}
    return replace(program, variables=variables, blocks=(root, *program.blocks[1:]))

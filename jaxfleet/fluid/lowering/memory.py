"""Memory of a run: recomputation from checkpoints, and a budget that the plan must fit.

A program stores the names of its checkpoints as an attribute. They take effect at lowering, after
every other rewrite, so random operators draw the same numbers as without checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfleet.analysis.flow import forward_places
from jaxfleet.errors import StrategyError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.ir import Operands, Role
from jaxfleet.ir import Operator as IrOperator
from jaxfleet.ir import Program as IrProgram
from jaxfleet.passes import Recompute
from jaxfleet.runtime.compiled_program import CompiledProgram
from jaxfleet.runtime.memory_budget import WithinBudget, within_budget
from jaxfleet.runtime.memory_report import MemoryReport
from jaxfleet.runtime.transpile import DumpSeries, run_passes

CHECKPOINTS = "checkpoints"


def keep_checkpoints(program: Program, checkpoints: Sequence[Any]) -> None:
    """Records the values from which backward starts: variables of block 0, or their names.

    Raises TypeError if a checkpoint is of another type, and ValueError if the program has no such
    variable.
    """
    names = []
    for one in checkpoints:
        check_type(one, "a checkpoint", (Variable, str))
        name = one if isinstance(one, str) else one.name
        if name not in program.global_block().vars:
            what = f"'{name}' is to be kept for backward, and the program has no such variable"
            raise mistake(what, "name a variable that a layer made")
        names.append(name)
    program._facts[CHECKPOINTS] = tuple(names)
    program.version += 1


def with_recomputation(
    made: IrProgram, fetch: Sequence[str], series: DumpSeries | None = None
) -> IrProgram:
    """Returns a program whose backward recomputes forward, from checkpoint to checkpoint.

    Without checkpoints, or without backward, the program is returned unchanged.

    `fetch` is ignored if an operator marks the fetched names. Raises PassError if the program is
    cut already, or a sub-block uses a variable written several times.
    """
    names = made.attrs.get(CHECKPOINTS, ())
    assert isinstance(names, tuple)
    if not names or not any(op.role is Role.BACKWARD for op in made.root.ops):
        return made
    cuts = _behind(made, {str(name) for name in names})
    if not cuts:
        return made
    rewrite = Recompute(cuts=cuts, saved=tuple(map(str, names)))
    root = made.root
    if wanted := [name for name in fetch if name in root.variables]:
        root = root.with_ops([*root.ops, IrOperator("fetch", Operands.of(*wanted))])
    return run_passes(made.with_block(root), [rewrite], series=series)


def _behind(made: IrProgram, names: set[str]) -> tuple[int, ...]:
    """Returns the positions after the operators that compute `names`, except the end of forward."""
    forward = sorted(forward_places(made))
    made_at = {name: n for n in forward for name in made.root.ops[n].writes if name in names}
    return tuple(sorted({n + 1 for n in made_at.values() if n < forward[-1]}))


@dataclass(eq=False)
class MemoryBudget:
    """The memory that a CompiledProgram may use besides state, feeds and fetches."""

    amount: float  # an int in bytes, or a float as a fraction of the unconstrained peak
    # the fitted programs, by feed and fetch names
    made: list[WithinBudget] = field(default_factory=list)

    def fitted(
        self, prepared: CompiledProgram, fetch: tuple[str, ...], device: Any
    ) -> CompiledProgram:
        """Returns a prepared program that plans for the shapes of its first feed."""
        found = within_budget(prepared, fetch, self.amount, device)
        assert isinstance(found.function, WithinBudget)
        self.made.append(found.function)
        return found

    def report(self) -> MemoryReport:
        """Returns the memory use as last compiled; StrategyError if the program has not run."""
        ran = [fitted for one in self.made for fitted in one.fitted.values()]
        if not ran:
            what = "memory_report: the program has not run, and is planned for what it is fed"
            raise StrategyError(what, hint="run it once by an Executor")
        return ran[-1].report()


def refused_budget(whose: str) -> StrategyError:
    """Returns the error for a budget on a kind of run, `whose`, that is not planned."""
    what = f"build_strategy.memory_budget: {whose} is not made to fit a budget"
    hint = "leave it out, or run a program on one device; jf.distribute plans for all modes"
    return StrategyError(what, hint=hint)


def is_budget(value: Any) -> bool:
    """Whether a value is a budget: None, bytes, or a fraction up to 1.0."""
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    return bool(0 < value <= 1 if isinstance(value, float | np.floating) else value > 0)

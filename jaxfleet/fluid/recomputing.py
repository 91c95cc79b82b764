"""Checkpoints: values of forward that are kept for backward, where the rest is computed again.

A program keeps their names as one of its facts. They act where it is made ready to run, behind all
else: operators are then what they are without checkpoints, so that random ones draw alike.
"""

from collections.abc import Sequence
from typing import Any

from jaxfleet.analysis.forward_part import forward_places
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.variable import Variable
from jaxfleet.ir import Operands, Role
from jaxfleet.ir import Operator as IrOperator
from jaxfleet.ir import Program as IrProgram
from jaxfleet.passes import Recompute
from jaxfleet.runtime.dump_series import DumpSeries, run_passes

CHECKPOINTS = "checkpoints"


def keep_checkpoints(program: Program, checkpoints: Sequence[Any]) -> None:
    """Says which values backward begins with.

    Args:
        program: it.
        checkpoints: variables of block 0 that forward makes, or their names.

    Raises:
        TypeError: one of them is something else.
        ValueError: the program has no such variable.
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


def recomputed(
    made: IrProgram, fetch: Sequence[str], series: DumpSeries | None = None
) -> IrProgram:
    """Returns a program whose backward computes forward again, from checkpoint to checkpoint.

    Without checkpoints, or without backward, it is what it was.

    Args:
        made: it.
        fetch: the names that are fetched, where no operator says so.
        series: a dump that this continues.

    Raises:
        PassError: it is cut already, or a sub-block uses what is written several times.
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
    """Returns the places behind the operators that make some values, but where forward ends."""
    forward = sorted(forward_places(made))
    made_at = {name: n for n in forward for name in made.root.ops[n].writes if name in names}
    return tuple(sorted({n + 1 for n in made_at.values() if n < forward[-1]}))

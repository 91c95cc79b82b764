"""Says when one of several processes that joined trains a program by itself."""

import warnings

from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.program import Program
from jaxfleet.group import joined
from jaxfleet.ops.frames import line_of_caller


def warn_alone(program: Program) -> None:
    """Warns where a program that updates runs on this rank alone, and nothing in it is exchanged.

    It is what the collective fleet was called for that exchanges: `fleet.main_program`, which is
    another than the script's own program.

    Args:
        program: what is about to run on one device.
    """
    here = joined()
    if here is None:
        return
    updates = next((op for op in program.global_block().ops if _updates(op)), None)
    if updates is None:
        return
    text = (
        f"this is rank {here.rank} of {here.size}, and the program that runs updates"
        f" '{updates.input('Param')[0]}' by this rank's rows alone: run fleet.main_program, or"
        " CompiledProgram(program).with_data_parallel()"
    )
    where = line_of_caller()
    if where is None:
        warnings.warn(text, stacklevel=2)
    else:
        warnings.warn_explicit(text, UserWarning, where.file, where.line)


def _updates(op: Operator) -> bool:
    return op._is_optimize_op() and bool(op.input("Grad"))

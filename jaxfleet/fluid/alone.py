"""Says when one of several processes trains a program by itself."""

from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.program import Program
from jaxfleet.group import joined, not_joined
from jaxfleet.ops.frames import warn_at_caller


def warn_alone(program: Program) -> None:
    """Warns where a program that updates runs on this rank alone, and nothing in it is exchanged.

    It is what the collective fleet was called for that exchanges: `fleet.main_program`, which is
    another than the script's own program. Or the script calls nothing that makes its program one
    of several processes, although several run it.

    Args:
        program: what is about to run on devices of this process.
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

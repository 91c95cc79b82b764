"""A startup program that names the processes that train together has this one join them."""

from jaxfleet.env import Rank, read_rank, says_how_many_cpu_devices
from jaxfleet.errors import StrategyError
from jaxfleet.fluid.program import Program
from jaxfleet.group import has_started, initialize, joined
from jaxfleet.runtime.devices import emulated_count


def join_named(program: Program) -> None:
    """Joins the processes that a program names, if it does and nobody has.

    The ranks of a collective transpiler may as well be devices of this process: so they are where
    jax has started, or is to start with several devices, and the environment names no group.

    Args:
        program: what is about to run.

    Raises:
        StrategyError: the environment names other processes, or another rank.
        ConnectError: somebody did not come.
    """
    if joined() is not None or (named := _named(program)) is None or len(named.endpoints) == 1:
        return
    told = read_rank()
    if told is None:
        if not _runs_here(program):
            initialize(named)
    elif (told.rank, len(told.endpoints)) != (named.rank, len(named.endpoints)):
        what = f"the program is that of rank {named.rank} of {len(named.endpoints)}"
        what = f"{what}, and this process is rank {told.rank} of {len(told.endpoints)}"
        raise StrategyError(what, hint="transpile with PADDLE_TRAINER_ID and all endpoints")
    else:
        initialize(told)


def _named(program: Program) -> Rank | None:
    """Returns the rank that a program makes of this process; None if it makes none."""
    for op in program.global_block().ops:
        if op.type == "gen_nccl_id":
            return Rank(op.attr("trainer_id"), tuple(op.attr("trainers")), "fluid")
        if op.type == "c_gen_nccl_id":
            rank, others = op.attr("rank"), list(op.attr("other_endpoints"))
            others.insert(rank, op.attr("endpoint"))
            return Rank(rank, tuple(others), "fluid")
    return None


def _runs_here(program: Program) -> bool:
    """Tells whether all ranks of a program run on devices of this process."""
    if has_started():
        return True
    is_of_ranks = program._facts.get("role") == "collective"
    return is_of_ranks and (says_how_many_cpu_devices() or emulated_count() > 1)

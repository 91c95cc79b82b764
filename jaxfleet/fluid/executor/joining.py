"""A startup program that names the processes that train together has this one join them."""

from contextlib import suppress

from jaxfleet.env import Rank, read_rank, says_how_many_cpu_devices
from jaxfleet.errors import StrategyError
from jaxfleet.fleet.same_rank import check_same_rank
from jaxfleet.fluid.program import Program
from jaxfleet.group import has_started, initialize, joined
from jaxfleet.group.clusters import detected_rank
from jaxfleet.runtime.devices import emulated_count

_BY_TRAINERS, _BY_RINGS = "gen_nccl_id", "c_gen_nccl_id"  # operators that name all processes
_SAYS = frozenset({_BY_TRAINERS, _BY_RINGS})
_CONNECT_S = 120.0  # as `initialize`: the longest that a cluster's processes are waited for


def names_others(program: Program) -> bool:
    """Tells whether a program says which processes train together."""
    return any(op.type in _SAYS for op in program.global_block().ops)


def join_named(program: Program) -> None:
    """Joins the processes that a program names, if it does and nobody has.

    The ranks of a collective transpiler may as well be devices of this process: so they are where
    jax has started, or is to start with several devices, and neither the environment nor a cluster
    names a group.

    Args:
        program: what is about to run.

    Raises:
        StrategyError: the environment names other processes, or another rank.
        ConnectError: somebody did not come.
    """
    if joined() is not None or (named := _named(program)) is None or len(named.endpoints) == 1:
        return
    said, told = _place(named), read_rank()
    if told is not None:
        hint = "transpile with PADDLE_TRAINER_ID and all endpoints"
        check_same_rank("the program is that of", said, _place(told), hint)
        initialize(told)
    elif (found := _detected()) is not None and _place(found) == said:
        initialize(found, connect_s=_CONNECT_S)
    elif not _runs_here(program):
        initialize(named)


def _detected() -> Rank | None:
    """Returns which rank a cluster says; a program that names all needs none that says it whole."""
    with suppress(StrategyError):
        return detected_rank(_CONNECT_S)
    return None


def _place(rank: Rank) -> tuple[int, int]:
    """Returns which rank of how many it is."""
    return rank.rank, len(rank.endpoints)


def _named(program: Program) -> Rank | None:
    """Returns the rank that a program makes of this process; None if it makes none."""
    for op in program.global_block().ops:
        if op.type == _BY_TRAINERS:
            return Rank(op.attr("trainer_id"), tuple(op.attr("trainers")), "fluid")
        if op.type == _BY_RINGS:
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

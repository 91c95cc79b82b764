"""Rank and size of this process in every mode, and the check for a forgotten `initialize`."""

from collections.abc import Sequence

from jaxfleet.cluster.bootstrap import RankPlace, joined
from jaxfleet.env import PserverRole, read_cluster, read_rank, read_roles, read_started
from jaxfleet.errors import StrategyError
from jaxfleet.ops.user_frames import line_of_caller, warn_at_caller


def rank() -> int:
    """The number of this process among those that train, from 0, in every mode.

    That is the rank in the group that `jf.initialize()` joined, the trainer id in a job with
    servers, and 0 in a process on its own. Before `jf.initialize()`, the environment that
    `jaxfleet launch` sets decides.

    Raises:
        StrategyError: this process is a server, or its environment contradicts itself.

    Examples:
        >>> import jaxfleet as jf
        >>> f"log-{jf.rank()}.txt"
        'log-0.txt'
    """
    return _place().rank


def size() -> int:
    """The number of processes that train; 1 for a process on its own.

    Raises:
        StrategyError: this process is a server, or its environment contradicts itself.

    Examples:
        >>> import jaxfleet as jf
        >>> global_rows = 64
        >>> global_rows // jf.size()
        64
    """
    return _place().size


def is_first() -> bool:
    """True in the one process that prints and writes for all: rank 0, and not a server.

    Raises:
        StrategyError: the environment contradicts itself.

    Examples:
        >>> import jaxfleet as jf
        >>> if jf.is_first():
        ...     print("step 100: loss 0.31")
        step 100: loss 0.31
    """
    return not is_server() and rank() == 0


def is_server() -> bool:
    """Whether this process is a server of a job."""
    cluster = None if joined() else cluster_of_process()
    return cluster is not None and cluster.role == "pserver"


def cluster_of_process() -> PserverRole | None:
    """The job with servers that this process is part of; None without servers."""
    return read_cluster() if has_servers() else None


def has_servers() -> bool:
    """Whether the environment names servers, whose trainers are not ranks of a group."""
    return "PADDLE_PSERVERS_IP_PORT_LIST" in read_roles()


def _place() -> RankPlace:
    group = joined()
    if group is not None:
        return RankPlace(group.rank, group.size)
    cluster = cluster_of_process()
    if cluster is not None:
        if cluster.trainer_id is None:
            raise StrategyError(
                "this process is a server, and only processes that train have a rank",
                hint="jf.is_first() is False on a server; run a server's process with step.serve()",
            )
        return RankPlace(cluster.trainer_id, cluster.trainers)
    launched = read_rank()
    return RankPlace() if launched is None else RankPlace(launched.rank, len(launched.endpoints))


def check_has_joined() -> None:
    """Raises if the environment names other processes but this one has not joined them.

    If srun or mpirun started other processes without a declared relation between them, it only
    warns: each may be meant to train by itself.

    Raises:
        StrategyError: `initialize` was not called, or the environment contradicts itself.
    """
    if (trainer := _trainer_of_servers()) is not None:
        warn_at_caller(
            f"{trainer} of a job with servers trains by itself, on the whole batch: the strategy"
            " uses no servers. Write strategy='pserver', or strategy='single' where it is meant so"
        )
    who = not_joined()
    if who is None:
        return
    if read_rank() is not None:
        hint = "call jf.initialize() before anything else of jax; strategy='single' trains apart"
        raise StrategyError(f"{who}, and has not joined the others", hint=hint)
    warn_at_caller(
        f"{who}, which has joined none of the others and trains by itself: call jf.initialize()"
        " before anything else of jax, or fleet.init(MPICollectiveRoleMaker()) where jax does not"
        " know this mpirun"
    )


def _trainer_of_servers() -> str | None:
    """The trainer of a job with servers that this process is; None if it is not a trainer."""
    cluster = cluster_of_process()
    if joined() is not None or cluster is None or cluster.trainer_id is None:
        return None
    return f"trainer {cluster.trainer_id} of {cluster.trainers}"


def not_joined() -> str | None:
    """Describes which of several processes this is; None if it is alone or has joined."""
    if joined() is not None or has_servers():
        return None
    here = read_rank()
    if here is not None:  # a single endpoint means a single process, whatever started the launcher
        size = len(here.endpoints)
        return f"this is rank {here.rank} of {size}" if size > 1 else None
    started = read_started()
    if started is None:
        return None
    return f"this is process {started.rank} of {started.size} that {started.by} started"


def split_files(
    files: Sequence[str], *, rank: int | None = None, size: int | None = None
) -> list[str]:
    """Returns this process's share of a list of files: contiguous; the first ranks get one more.

    Args:
        files: the same list on every process.
        rank: which process; `jf.rank()` by default.
        size: the number of processes; `jf.size()` by default.

    Raises:
        StrategyError: the rank is out of range, or this process is a server.

    Examples:
        >>> import jaxfleet as jf
        >>> jf.split_files(["a.csv", "b.csv", "c.csv"], rank=0, size=2)
        ['a.csv', 'b.csv']
    """
    if rank is None and size is None and is_server():
        return []  # the script may run on servers too, which do not train
    here = RankPlace() if rank is not None and size is not None else _place()
    count, which = here.size if size is None else size, here.rank if rank is None else rank
    if not 0 <= which < count:
        raise StrategyError(f"split_files: there is no process {which} among {count}")
    each, more = divmod(len(files), count)
    start = which * each + min(which, more)
    return list(files[start : start + each + (which < more)])


def check_same_rank(who: str, said: tuple[int, int], here: tuple[int, int], hint: str) -> None:
    """Rejects an object that belongs to another rank than this process.

    `said` and `here` are pairs of rank and size; `who` begins the message: `the program is that
    of`.
    """
    if said != here:
        what = f"{who} rank {said[0]} of {said[1]}, and this process is rank {here[0]} of {here[1]}"
        raise StrategyError(what, source=line_of_caller(), hint=hint)

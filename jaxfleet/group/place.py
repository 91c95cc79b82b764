"""The place of this process among the processes that train, in every mode."""

from jaxfleet.env import Cluster, read_cluster, read_rank, read_roles
from jaxfleet.errors import StrategyError
from jaxfleet.group.joining import Place, joined


def rank() -> int:
    """The number of this process among those that train, from 0, in every mode.

    That is the rank in the group that `jf.initialize()` joined, the number of a trainer in a job
    with servers, and 0 in a process on its own. Before `jf.initialize()`, the environment that
    `jaxfleet launch` sets decides.

    Raises:
        StrategyError: this process is a server, or its environment contradicts itself.
    """
    return _place().rank


def size() -> int:
    """The number of processes that train; 1 for a process on its own.

    Raises:
        StrategyError: this process is a server, or its environment contradicts itself.
    """
    return _place().size


def is_first() -> bool:
    """Whether this process is the one to print and to write for all: rank 0, and no server.

    Raises:
        StrategyError: the environment contradicts itself.
    """
    return not is_server() and rank() == 0


def is_server() -> bool:
    """Whether this process is a server of a job."""
    cluster = None if joined() else cluster_of_process()
    return cluster is not None and cluster.role == "pserver"


def cluster_of_process() -> Cluster | None:
    """The job with servers that this process is part of; None without servers."""
    return read_cluster() if has_servers() else None


def has_servers() -> bool:
    """Whether the environment names servers, whose trainers are no ranks of a group."""
    return "PADDLE_PSERVERS_IP_PORT_LIST" in read_roles()


def _place() -> Place:
    group = joined()
    if group is not None:
        return Place(group.rank, group.size)
    cluster = cluster_of_process()
    if cluster is not None:
        if cluster.trainer_id is None:
            raise StrategyError(
                "this process is a server, and only processes that train have a rank",
                hint="jf.is_first() is False on a server; run a server's process with step.serve()",
            )
        return Place(cluster.trainer_id, cluster.trainers)
    launched = read_rank()
    return Place() if launched is None else Place(launched.rank, len(launched.endpoints))

"""Says what the environment knows of others, where this process has joined nobody."""

from jaxfleet.env import read_rank, read_started
from jaxfleet.errors import StrategyError
from jaxfleet.group.joining import joined
from jaxfleet.group.place import cluster_of_process, has_servers
from jaxfleet.ops.frames import warn_at_caller


def check_has_joined() -> None:
    """Refuses to go on alone where the environment names others, whom nobody has joined.

    Where srun or mpirun started others, and nothing says what they have to do with each other, it
    warns: each may well be meant to train by itself.

    Raises:
        StrategyError: `initialize` was forgotten, or the environment contradicts itself.
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
    """Which trainer of a job with servers this process is; None if it is none."""
    cluster = cluster_of_process()
    if joined() is not None or cluster is None or cluster.trainer_id is None:
        return None
    return f"trainer {cluster.trainer_id} of {cluster.trainers}"


def not_joined() -> str | None:
    """Returns which of several processes this is, in words; None where it is alone or joined."""
    if joined() is not None or has_servers():
        return None
    here = read_rank()
    if here is not None:  # one endpoint says that it is alone, whatever started the launch
        size = len(here.endpoints)
        return f"this is rank {here.rank} of {size}" if size > 1 else None
    started = read_started()
    if started is None:
        return None
    return f"this is process {started.rank} of {started.size} that {started.by} started"

"""What a cluster's own environment says of this process, as jax finds it."""

from typing import Any

from jaxfleet.env import Rank, read_job, read_restart
from jaxfleet.errors import StrategyError


def detected_rank(connect_s: float) -> Rank | None:
    """Returns which rank SLURM, Open MPI or Kubernetes say that this is; None where none does.

    jax looks for them in `jax.distributed.initialize`, and says what it found to nobody; so this
    asks its own classes. There, of all endpoints, only the first is known: where all meet.

    Raises:
        StrategyError: one of them is there, and does not say it.
    """
    try:
        from jax._src.clusters import ClusterEnv  # noqa: PLC0415  # there is no public way to ask

        detect = ClusterEnv.auto_detect_unset_distributed_params
    except (ImportError, AttributeError):  # of a jax that has them elsewhere
        return None
    try:
        found: Any = detect(None, None, None, None, None, round(connect_s))
    except Exception as error:  # what is not set, or not answered, comes as it does
        what = "a cluster started this process, and jax does not find out which one it is: "
        hint = "set PADDLE_TRAINER_ENDPOINTS and PADDLE_TRAINER_ID, or unset what the cluster set"
        raise StrategyError(f"{what}{type(error).__name__}: {error}", hint=hint) from error
    first, size, rank, devices = found
    if first is None or size is None or rank is None:
        return None
    job = read_job()
    endpoints = (first, *[""] * (size - 1))
    return Rank(rank, endpoints, job.name, job.secret_file, read_restart(), tuple(devices or ()))

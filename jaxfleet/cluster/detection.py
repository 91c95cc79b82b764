"""Rank of this process as the cluster's environment specifies it, detected by JAX."""

from typing import Any

from jaxfleet.env import Rank, read_job, read_restart
from jaxfleet.errors import StrategyError


def detected_rank(connect_s: float) -> Rank | None:
    """Returns the rank that SLURM, Open MPI or Kubernetes specify; None outside of them.

    `jax.distributed.initialize` detects them but does not report the result, so this queries jax's
    own classes. They provide only the first endpoint, the rendezvous.

    Raises:
        StrategyError: one of them is present but does not specify the rank.
    """
    try:
        from jax._src.clusters import ClusterEnv  # noqa: PLC0415  # there is no public API

        detect = ClusterEnv.auto_detect_unset_distributed_params
    except (ImportError, AttributeError):  # a jax that has them elsewhere
        return None
    try:
        found: Any = detect(None, None, None, None, None, round(connect_s))
    except Exception as error:  # unset variables and failed queries raise errors of many types
        what = "a cluster started this process, and jax does not find out which one it is: "
        hint = "set PADDLE_TRAINER_ENDPOINTS and PADDLE_TRAINER_ID, or unset what the cluster set"
        raise StrategyError(f"{what}{type(error).__name__}: {error}", hint=hint) from error
    first, size, rank, devices = found
    if first is None or size is None or rank is None:
        return None
    job = read_job()
    endpoints = (first, *[""] * (size - 1))
    return Rank(rank, endpoints, job.name, job.secret_file, read_restart(), tuple(devices or ()))

"""What a cluster's own environment says of this process, as jax finds it."""

from contextlib import suppress
from typing import Any

from jaxfleet.env import Rank, read_job, read_restart


def detected_rank(connect_s: float) -> Rank | None:
    """Returns which rank SLURM, Open MPI or Kubernetes say that this is; None where none does.

    jax looks for them in `jax.distributed.initialize`, and says what it found to nobody; so this
    asks its own classes. There, of all endpoints, only the first is known: where all meet.
    """
    with suppress(ImportError, AttributeError):  # of a jax that has them elsewhere
        from jax._src.clusters import ClusterEnv  # noqa: PLC0415  there is no public way to ask

        found: Any = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, round(connect_s)
        )
        first, size, rank, devices = found
        if first is not None and size is not None and rank is not None:
            job = read_job()
            endpoints = (first, *[""] * (size - 1))
            gpus = tuple(devices or ())
            return Rank(rank, endpoints, job.name, job.secret_file, read_restart(), gpus)
    return None

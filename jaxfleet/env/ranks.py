"""Rank of this process in a collective job, or as srun, mpirun or PaddleCloud set it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxfleet.env.fluid import read_selected_gpus
from jaxfleet.env.jobs import read_endpoints, read_job, read_restart, read_trainer_id
from jaxfleet.env.variables import (
    CURRENT,
    GPUS,
    JOB,
    MEETING_DIR,
    OF_CLUSTERS,
    PLATFORMS,
    RESTART,
    ROLE,
    ROLE_TOO,
    SECRET_FILE,
    TRAINER_ENDPOINTS,
    TRAINER_ID,
    TRAINERS,
    XLA_FLAGS,
    get,
    read_number,
    refuse,
    whole,
)

_CPU_DEVICES = "--xla_force_host_platform_device_count"
_PROXIES = ("http_proxy", "https_proxy")
_NO_PROXY = ("no_grpc_proxy", "no_proxy")  # hosts that gRPC reaches directly; it reads the first


@dataclass(frozen=True)
class Rank:
    """Rank of a process in a collective job.

    Attributes:
        rank: `PADDLE_TRAINER_ID`.
        endpoints: `PADDLE_TRAINER_ENDPOINTS`; one per rank, in order.
        job: `JAXFLEET_JOB`.
        secret_file: `JAXFLEET_SECRET_FILE`.
        restart: `JAXFLEET_RESTART`; the number of restarts of the job.
        gpus: `FLAGS_selected_gpus`; the GPUs of this rank, empty for jax's default.
        cpu_devices: number of CPU devices (`XLA_FLAGS`); None for jax's default.
        proxies: whether it may reach others through a proxy; fluid's launch forbids it.
        meeting_dir: `JAXFLEET_MEETING_DIR`; the default rendezvous of the processes.
    """

    rank: int
    endpoints: tuple[str, ...]
    job: str
    secret_file: Path | None = None
    restart: int = 0
    gpus: tuple[int, ...] = ()
    cpu_devices: int | None = None
    proxies: bool = True
    meeting_dir: Path | None = None


def read_rank() -> Rank | None:
    """Returns the rank of this process; None if the environment specifies no collective job.

    `PADDLE_TRAINERS_NUM` and `PADDLE_CURRENT_ENDPOINT` are optional but must agree; the latter
    replaces a missing `PADDLE_TRAINER_ID`.
    """
    if not get(TRAINER_ENDPOINTS):
        return None
    endpoints, current = read_endpoints(TRAINER_ENDPOINTS), get(CURRENT)
    if get(TRAINERS) and read_number(TRAINERS, least=1) != len(endpoints):
        what = f"is {get(TRAINERS)}, but {TRAINER_ENDPOINTS} has {len(endpoints)} endpoints"
        refuse(TRAINERS, what, "give every rank one endpoint")
    if current and current not in endpoints:
        what = f"is {current}, which is not in {TRAINER_ENDPOINTS}: {', '.join(endpoints)}"
        refuse(CURRENT, what, "write the endpoint as it stands in the list")
    if current and not get(TRAINER_ID):
        rank = endpoints.index(current)
    else:
        rank = read_trainer_id(len(endpoints), TRAINER_ENDPOINTS)
    if current and endpoints[rank] != current:
        what = f"is {current}, but rank {rank} of {TRAINER_ENDPOINTS} is {endpoints[rank]}"
        refuse(CURRENT, what, f"it is the one that {TRAINER_ID} counts to, from 0")
    job, gpus = read_job(), read_selected_gpus() or ()
    return Rank(rank, endpoints, job.name, job.secret_file, read_restart(), gpus)


def rank_environment(rank: Rank) -> dict[str, str]:
    """Returns the whole environment of a child with this rank, based on this process's."""
    left_out = (*OF_CLUSTERS, GPUS, *(() if rank.proxies else _PROXIES))
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    settings: Mapping[str, object] = {
        ROLE: "TRAINER",
        ROLE_TOO: "TRAINER",
        TRAINER_ENDPOINTS: ",".join(rank.endpoints),
        CURRENT: rank.endpoints[rank.rank],
        TRAINER_ID: rank.rank,
        TRAINERS: len(rank.endpoints),
        JOB: rank.job,
        SECRET_FILE: rank.secret_file,
        RESTART: rank.restart,
        MEETING_DIR: rank.meeting_dir,
        GPUS: ",".join(map(str, rank.gpus)) or None,
    }
    if any(name in kept for name in ("grpc_proxy", *_PROXIES)):
        settings = {**settings, _NO_PROXY[0]: _without_proxy(rank.endpoints)}
    if rank.cpu_devices is not None:
        others = [word for word in get(XLA_FLAGS).split() if not word.startswith(_CPU_DEVICES)]
        settings = {
            **settings,
            XLA_FLAGS: " ".join([*others, f"{_CPU_DEVICES}={rank.cpu_devices}"]),
            PLATFORMS: get(PLATFORMS) or "cpu",  # otherwise jax would prefer a GPU
        }
    return kept | {name: str(value) for name, value in settings.items() if value is not None}


def _without_proxy(endpoints: tuple[str, ...]) -> str:
    """Adds the ranks' hosts to those that gRPC reaches directly: a proxy would refuse them."""
    before = get(_NO_PROXY[0]) or get(_NO_PROXY[1])
    hosts = dict.fromkeys(endpoint.rpartition(":")[0] for endpoint in endpoints)
    return ",".join([*([before] if before else []), *hosts])


# srun's variables are those of its own step: a batch script, a single process, has none.
_STARTERS = (
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE"),
    ("PaddleCloud", TRAINER_ID, TRAINERS),
)


@dataclass(frozen=True)
class Started:
    """Rank of one of several processes.

    Attributes:
        by: the program that started them.
        rank: `SLURM_PROCID`, `OMPI_COMM_WORLD_RANK`, `PMI_RANK` or `PADDLE_TRAINER_ID`.
        size: `SLURM_STEP_NUM_TASKS`, `OMPI_COMM_WORLD_SIZE`, `PMI_SIZE` or `PADDLE_TRAINERS_NUM`;
            2 at least.
    """

    by: str
    rank: int
    size: int


def read_started() -> Started | None:
    """Returns the rank of this process; None unless a launcher started several."""
    for by, rank, size in _STARTERS:
        number, count = whole(get(rank)), whole(get(size))
        if number is not None and count is not None and count > 1:
            return Started(by, number, count)
    return None

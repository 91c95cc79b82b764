"""Rank of this process as set by srun, mpirun or PaddleCloud."""

from dataclasses import dataclass

from jaxfleet.env.variables import TRAINER_ID, TRAINERS, get, whole

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

"""Which of several processes this is, by what srun, mpirun and PaddleCloud set in each."""

from dataclasses import dataclass

from jaxfleet.env.names import TRAINER_ID, TRAINERS
from jaxfleet.env.reading import get, whole

# srun's are those of its own step, so that a batch script, which is one process, has none.
_STARTERS = (
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE"),
    ("PaddleCloud", TRAINER_ID, TRAINERS),
)


@dataclass(frozen=True)
class Started:
    """Holds which of several processes one is.

    Attributes:
        by: what started them.
        rank: `SLURM_PROCID`, `OMPI_COMM_WORLD_RANK`, `PMI_RANK` or `PADDLE_TRAINER_ID`.
        size: `SLURM_STEP_NUM_TASKS`, `OMPI_COMM_WORLD_SIZE`, `PMI_SIZE` or `PADDLE_TRAINERS_NUM`;
            2 at least.
    """

    by: str
    rank: int
    size: int


def read_started() -> Started | None:
    """Returns which of several processes this is; None where nothing started more than one."""
    for by, rank, size in _STARTERS:
        number, count = whole(get(rank)), whole(get(size))
        if number is not None and count is not None and count > 1:
            return Started(by, number, count)
    return None

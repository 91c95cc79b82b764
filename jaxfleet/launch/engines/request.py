"""What a job asks of a cluster's scheduler: machines, processes, and processors for each."""

from dataclasses import dataclass, field
from pathlib import Path

from jaxfleet.errors import StrategyError
from jaxfleet.launch.job_spec import CollectiveJob, Job, Nodes, check_range


@dataclass(frozen=True)
class Resources:
    """What each process gets; a rank of a collective job counts as a trainer.

    Attributes:
        cpus_per_trainer: processors of each trainer.
        cpus_per_server: processors of each server.
        gpus_per_trainer: GPUs of each trainer.
    """

    cpus_per_trainer: int = 1
    cpus_per_server: int = 1
    gpus_per_trainer: int = 0

    def __post_init__(self) -> None:
        check_range("cpus per trainer", self.cpus_per_trainer, 1, 1024)
        check_range("cpus per server", self.cpus_per_server, 1, 1024)
        check_range("gpus per trainer", self.gpus_per_trainer, 0, 64)


@dataclass(frozen=True)
class Request:
    """A job on machines that a scheduler chooses.

    Attributes:
        job: the job, on machines of any names; their number is right.
        words: the options and the script of its launch on each machine, without those that name
            machines, port and secret.
        resources: what its processes get.
        secret_file: the job's secret, which all machines can read; a new one by default.
        insecure: the job has no secret.
    """

    job: Job | CollectiveJob
    words: tuple[str, ...]
    resources: Resources = field(default_factory=Resources)
    secret_file: Path | None = None
    insecure: bool = False

    @property
    def machines(self) -> int:
        return len(self.job.nodes.names)

    @property
    def trainers(self) -> int:
        """The most trainers, or ranks, of one machine: the first has no fewer than the others."""
        if isinstance(self.job, CollectiveJob):
            return self.job.nproc
        return len(self.job.nodes.share(self.job.trainers, 0))

    @property
    def servers(self) -> int:
        """The most servers of one machine."""
        if isinstance(self.job, CollectiveJob):
            return 0
        return len(self.job.nodes.share(self.job.servers, 0))

    @property
    def cpus(self) -> int:
        """The processors that a machine gives the job."""
        resources = self.resources
        return self.trainers * resources.cpus_per_trainer + self.servers * resources.cpus_per_server

    @property
    def gpus(self) -> int:
        """The GPUs that a machine gives the job."""
        return self.trainers * self.resources.gpus_per_trainer

    @property
    def ports(self) -> int:
        """The most consecutive ports that the job uses on one machine."""
        if isinstance(self.job, CollectiveJob):
            return self.job.nproc + 2  # of JAX's coordinator, and of a meeting of launches
        return self.servers + 1

    @property
    def goes_on(self) -> bool:
        """Whether the job, started again, goes on from checkpoints that outlive its launches.

        Periodic ones do. From servers' own a job goes on too, but not if it dies at step 0: a
        script then begins with a state of its own, which they refuse.
        """
        return self.job.save_every is not None and self.job.save_to is not None


def any_machines(count: int) -> Nodes:
    """Returns that many machines without names of their own, of which this is the first.

    Raises:
        StrategyError: the count is below 1.
    """
    if count < 1:
        raise StrategyError(f"a job on {count} machines", hint="--nodes is how many there are")
    names = tuple(f"machine-{number}" for number in range(count))
    return Nodes(names, names[0])

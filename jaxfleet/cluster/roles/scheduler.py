"""Roles from the cluster's scheduler: SLURM, Open MPI or Kubernetes, as JAX detects them."""

from pathlib import Path

from jaxfleet.cluster.bootstrap import detected_rank
from jaxfleet.cluster.rendezvous import FileRendezvous, Roster
from jaxfleet.cluster.roles.base import RendezvousRoleMaker, Role
from jaxfleet.cluster.roles.endpoint_exchange import all_endpoints, all_ips
from jaxfleet.env import read_job
from jaxfleet.errors import StrategyError
from jaxfleet.ops.user_frames import line_of_caller


class ClusterRoleMaker(RendezvousRoleMaker):
    """Takes the rank of a process from the cluster's scheduler, and ignores PADDLE_*.

    Without servers every process is a worker. Of the workers' endpoints only the first, the
    rendezvous, is known; the others are empty. With servers, the processes of the lowest ranks
    serve and the others train; they exchange their endpoints through a folder.

    Args:
        servers: the number of servers.
        path: a folder of this job that all processes see; required with servers.
        init_timeout_seconds: the longest wait for all to arrive.
        run_timeout_seconds: the longest wait at one gather.

    Raises:
        StrategyError: servers without a path.
    """

    def __init__(
        self,
        servers: int = 0,
        path: str = "",
        *,
        init_timeout_seconds: float = 3600.0,
        run_timeout_seconds: float = 3600.0,
    ) -> None:
        super().__init__()
        if servers and not path:
            what = f"{servers} servers and their trainers have no folder to meet in"
            hint = "give path= a folder that all see, such as one named by the job's number"
            raise StrategyError(what, source=line_of_caller(), hint=hint)
        self._servers, self._path = servers, Path(path)
        self._connect_s = float(init_timeout_seconds)
        self._timeout_s = float(run_timeout_seconds)

    def generate_role(self) -> None:
        """Determines the role, and with servers all endpoints; idempotent.

        Raises:
            StrategyError: no cluster started this process, or there are too few processes.
            ConnectError: a process never arrived.
        """
        if self._role_is_generated:
            return
        found = detected_rank(self._connect_s)
        if found is None:
            what = "no cluster says which process this is: SLURM, Open MPI, Kubernetes (JobSet)"
            hint = "start it by srun, mpirun or a JobSet, or use PaddleCloudRoleMaker()"
            raise StrategyError(what, source=line_of_caller(), hint=hint)
        rank, endpoints = found.rank, found.endpoints
        workers = len(endpoints) - self._servers
        if workers < 1:
            what = (
                f"the cluster started {len(endpoints)} processes, and {self._servers} are to serve"
            )
            raise StrategyError(what, source=line_of_caller(), hint="start one more at least")
        is_server = rank < self._servers
        self._role = Role.SERVER if is_server else Role.WORKER
        self._current_id = rank if is_server else rank - self._servers
        if self._servers:
            self._meet_others(workers)
        else:
            self._worker_endpoints = list(endpoints)
        self._workers, self._role_is_generated = workers, True

    def _meet_others(self, workers: int) -> None:
        """Meets all processes, and learns the servers' endpoints."""
        is_worker = self._role == Role.WORKER
        nameless = Roster(
            [""] * workers, [""] * self._servers, is_worker=is_worker, index=self._current_id
        )
        meeting = FileRendezvous(
            self._path,
            nameless,
            connect_s=self._connect_s,
            timeout_s=self._timeout_s,
            job=read_job().name,
        )
        meeting.join()
        serving = range(workers, workers + self._servers)  # in the order of the rendezvous
        ips = all_ips(meeting)
        self._server_endpoints = all_endpoints(meeting, ips, serving, nameless.rank)
        self._meeting = meeting


class K8SRoleMaker(ClusterRoleMaker):
    """`ClusterRoleMaker` under the name that fluid's documents give it for Kubernetes.

    The registry in those documents is the Kubernetes API: jax reads the pods of an indexed Job or a
    JobSet there.
    """

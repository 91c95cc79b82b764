"""Roles that a cluster says: SLURM, Open MPI or Kubernetes, as jax detects them."""

from pathlib import Path
from urllib.parse import quote

from jaxfleet.env import read_job
from jaxfleet.errors import StrategyError
from jaxfleet.fleet.meeting import FolderMeeting, Roster
from jaxfleet.fleet.roles.addresses import all_endpoints, all_ips
from jaxfleet.fleet.roles.generated import GeneratedRoleMaker
from jaxfleet.fleet.roles.role import Role
from jaxfleet.group.clusters import detected_rank
from jaxfleet.ops.frames import line_of_caller


class ClusterRoleMaker(GeneratedRoleMaker):
    """Takes the number of a process from the cluster that started it, and nothing from PADDLE_*.

    Without servers every process is a worker. Of the workers' endpoints only the first is known,
    where all meet; the others are empty. With servers, the processes numbered from 0 serve and the
    others work; they tell each other where they are through a folder.

    Args:
        servers: how many of the processes serve.
        path: a folder of this job's own that all see; needed where there are servers.
        init_timeout_seconds: how long all may take to come.
        run_timeout_seconds: how long all may take to come to one gathering.

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
        """Finds out what this process is, and with servers where all are; again, it does nothing.

        Raises:
            StrategyError: no cluster started this process, or fewer processes than there should be.
            ConnectError: somebody never came.
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
        """Meets all, and learns where the servers are."""
        is_worker = self._role == Role.WORKER
        nameless = Roster(
            [""] * workers, [""] * self._servers, is_worker=is_worker, index=self._current_id
        )
        meeting = FolderMeeting(
            self._path,
            nameless,
            connect_s=self._connect_s,
            timeout_s=self._timeout_s,
            prefix=quote(read_job().name, safe=""),
        )
        meeting.join()
        serving = range(workers, workers + self._servers)  # by the order of the meeting
        ips = all_ips(meeting)
        self._server_endpoints = all_endpoints(meeting, ips, serving, nameless.rank)
        self._meeting = meeting


class K8SRoleMaker(ClusterRoleMaker):
    """`ClusterRoleMaker` under the name that fluid's documents give it for Kubernetes.

    The registry that they speak of is the Kubernetes API: jax reads the pods of an indexed Job or
    a JobSet there.
    """

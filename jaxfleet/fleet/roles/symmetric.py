"""Jobs of mpirun with as many servers as workers."""

from collections.abc import Sequence

from jaxfleet.errors import StrategyError
from jaxfleet.fleet.roles.mpi import MPIRoleMaker
from jaxfleet.fleet.roles.role import Role
from jaxfleet.ops.frames import line_of_caller


class MPISymetricRoleMaker(MPIRoleMaker):
    """Takes processes of even rank for servers and those of odd rank for workers.

    mpirun starts two processes on each machine, and each has one of both. Where it starts more, as
    many do on one machine in a test, every server has a port of its own.

    Args:
        timeout_seconds: how long all may take to come to one gathering.
    """

    def generate_role(self) -> None:
        """Finds out what this process is, with all others; again, it does nothing.

        Raises:
            StrategyError: the number of processes is odd.
            PeerLostError: somebody does not come.
        """
        if self._role_is_generated:
            return
        size, rank = self._get_size(), self._get_rank()
        if size % 2:
            what = f"MPISymetricRoleMaker is one of {size} processes, which are no pairs"
            hint = f"mpirun -n {size + 1}: a server and a worker each"
            raise StrategyError(what, source=line_of_caller(), hint=hint)
        servers, workers = range(0, size, 2), range(1, size, 2)
        self._worker_endpoints = self._get_ips()[1::2]
        self._server_endpoints = self._endpoints_of(servers)
        self._role = Role.SERVER if rank % 2 == 0 else Role.WORKER
        self._current_id = rank // 2
        is_worker = self._role == Role.WORKER
        self._belong_to("trainer" if is_worker else "pserver", workers if is_worker else servers)
        self._role_is_generated = True

    def is_worker(self) -> bool:
        return self._check_role_generation() and self._role == Role.WORKER

    def is_server(self) -> bool:
        return self._check_role_generation() and self._role == Role.SERVER

    def is_first_worker(self) -> bool:
        return self.is_worker() and self._current_id == 0

    def worker_num(self) -> int:
        self._check_role_generation()
        return self._get_size() // 2

    def server_num(self) -> int:
        """Returns how many servers the job has."""
        return self.worker_num()

    def worker_index(self) -> int:
        self._check_role_generation()
        return self._current_id

    def server_index(self) -> int:
        self._check_role_generation()
        return self._current_id

    def get_trainer_endpoints(self) -> list[str]:
        """Returns the addresses of the workers' machines: workers do not listen."""
        self._check_role_generation()
        return self._worker_endpoints

    def get_pserver_endpoints(self) -> list[str]:
        self._check_role_generation()
        return self._server_endpoints

    def _get_node_type(self) -> int:
        """Returns 0 on a server and 1 on a worker."""
        return int(self.is_worker())


class MPICollectiveRoleMaker(MPIRoleMaker):
    """Takes every process that mpirun started for a worker; there are no servers.

    The endpoint of each is a port that was free; at the first the group of a collective job meets.

    Args:
        timeout_seconds: how long all may take to come to one gathering.
    """

    def generate_role(self) -> None:
        """Finds out what this process is, with all others; again, it does nothing.

        Raises:
            PeerLostError: somebody does not come.
        """
        if self._role_is_generated:
            return
        everybody: Sequence[int] = range(self._get_size())
        self._worker_endpoints = self._endpoints_of(everybody)
        self._role, self._current_id = Role.WORKER, self._get_rank()
        self._belong_to("trainer", everybody)
        self._role_is_generated = True

    def is_worker(self) -> bool:
        return self._check_role_generation()

    def is_server(self) -> bool:
        return not self._check_role_generation()

    def is_first_worker(self) -> bool:
        return self.is_worker() and self._current_id == 0

    def worker_num(self) -> int:
        self._check_role_generation()
        return self._get_size()

    def server_num(self) -> int:
        """Returns 0."""
        return 0

    def worker_index(self) -> int:
        self._check_role_generation()
        return self._current_id

    def get_trainer_endpoints(self) -> list[str]:
        self._check_role_generation()
        return self._worker_endpoints

"""Roles of processes started by mpirun, with or without as many servers as workers."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.cluster.rendezvous import GroupName, Rendezvous
from jaxfleet.cluster.rendezvous.mpi_rendezvous import MpiRendezvous, end_all_on_error, find_mpi
from jaxfleet.cluster.roles.base import GroupedRoleMaker, KnownRoleMaker, Role, RoleMakerBase
from jaxfleet.cluster.roles.endpoint_exchange import all_endpoints, all_ips, local_ip
from jaxfleet.errors import NotReadyError, StrategyError
from jaxfleet.ops.user_frames import line_of_caller


class MPIRoleMaker(GroupedRoleMaker):
    """Base of roles from MPI; a subclass assigns the roles.

    The constructor starts MPI in this process, by mpi4py (`pip install 'jaxfleet[mpi]'`). From then
    on, an uncaught error ends the whole job.

    Args:
        timeout_seconds: the longest wait at one gather.

    Raises:
        UnsupportedError: mpi4py or MPI is missing.
    """

    def __init__(self, *, timeout_seconds: float = 3600.0) -> None:
        super().__init__()
        self.MPI = find_mpi()
        self._comm = self.MPI.COMM_WORLD
        end_all_on_error(self._comm)
        self._ips: list[str] | None = None
        self._world = MpiRendezvous(self._comm, float(timeout_seconds))

    def get_local_ip(self) -> str:
        """Returns this machine's address, by a lookup of its host name.

        Raises:
            StrategyError: the host name does not resolve.
        """
        return local_ip()

    def _get_rank(self) -> int:
        return int(self._comm.Get_rank())

    def _get_size(self) -> int:
        return int(self._comm.Get_size())

    def _get_ips(self) -> list[str]:
        if self._ips is None:
            self._ips = all_ips(self._world)
        return self._ips

    def _all_gather(self, obj: Any) -> list[Any]:
        return self._world.gather("all", obj, "all_gather")

    def _finalize(self) -> None:
        """Ends MPI in this process: no part of it may be called any more."""
        if not self.MPI.Is_finalized():
            self.MPI.Finalize()

    def _endpoints_of(self, ranks: Sequence[int]) -> list[str]:
        return all_endpoints(self._world, self._get_ips(), ranks, self._get_rank())

    def _belong_to(self, group: GroupName, members: Sequence[int]) -> None:
        """Declares the processes that have this process's role."""
        self._world.add(group, members)
        self._meeting = self._world

    def _ensure_role(self) -> None:
        self._check_role_generation()

    def _way(self) -> Rendezvous:
        self._check_role_generation()
        assert self._meeting is not None
        return self._meeting

    def _check_role_generation(self) -> bool:
        """Returns True once the role is known.

        Until then it raises NameError.
        """
        if not self._role_is_generated:
            raise NotReadyError("generate_role() should be called first", source=line_of_caller())
        return True


class MPISymetricRoleMaker(MPIRoleMaker, KnownRoleMaker):
    """Processes of even rank are servers and those of odd rank are workers.

    mpirun starts two processes on each machine, one of each role. If it starts more, as tests do on
    one machine, every server has a port of its own.
    """

    def generate_role(self) -> None:
        """Determines the role, together with all processes; idempotent.

        Raises:
            StrategyError: the number of processes is odd.
            PeerLostError: a process does not arrive.
        """
        if self._role_is_generated:
            return
        size, rank = self._get_size(), self._get_rank()
        if size % 2:
            what = f"MPISymetricRoleMaker is one of {size} processes, which are no pairs"
            hint = f"mpirun -n {size + 1}: a server and a worker each"
            raise StrategyError(what, source=line_of_caller(), hint=hint)
        servers, workers = range(0, size, 2), range(1, size, 2)
        self._worker_endpoints = self._get_ips()[1::2]  # workers do not listen
        self._server_endpoints = self._endpoints_of(servers)
        self._role = Role.SERVER if rank % 2 == 0 else Role.WORKER
        self._current_id, self._workers = rank // 2, size // 2
        is_worker = self._role == Role.WORKER
        self._belong_to("trainer" if is_worker else "pserver", workers if is_worker else servers)
        self._role_is_generated = True

    to_string = RoleMakerBase.to_string

    def _get_node_type(self) -> int:
        """Returns 0 on a server and 1 on a worker."""
        return int(self.is_worker())


class MPICollectiveRoleMaker(MPIRoleMaker, KnownRoleMaker):
    """Every process that mpirun started is a worker; there are no servers.

    Each has an endpoint with a free port; the group of a collective job meets at the first.
    """

    _has_servers = False

    def generate_role(self) -> None:
        """Determines the role, together with all processes; idempotent.

        Raises:
            PeerLostError: a process does not arrive.
        """
        if self._role_is_generated:
            return
        everybody: Sequence[int] = range(self._get_size())
        self._worker_endpoints = self._endpoints_of(everybody)
        self._role, self._current_id = Role.WORKER, self._get_rank()
        self._workers = len(everybody)
        self._belong_to("trainer", everybody)
        self._role_is_generated = True

    to_string = RoleMakerBase.to_string

"""Roles of processes that mpirun started."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.errors import NotReadyError
from jaxfleet.fleet.meeting import GroupName, Meeting
from jaxfleet.fleet.meeting.mpi import MpiMeeting, end_all_on_error, find_mpi
from jaxfleet.fleet.roles.addresses import all_endpoints, all_ips, local_ip
from jaxfleet.fleet.roles.grouped import GroupedRoleMaker
from jaxfleet.ops.frames import line_of_caller


class MPIRoleMaker(GroupedRoleMaker):
    """Knows the processes of a job by MPI; a class of your own says which of them do what.

    To make one starts MPI in this process, by mpi4py (`pip install 'jaxfleet[mpi]'`). From then
    on, an error that nobody catches ends the whole job.

    Args:
        timeout_seconds: how long all may take to come to one gathering.

    Raises:
        UnsupportedError: there is no mpi4py, or no MPI.
    """

    def __init__(self, *, timeout_seconds: float = 3600.0) -> None:
        super().__init__()
        self.MPI = find_mpi()
        self._comm = self.MPI.COMM_WORLD
        end_all_on_error(self._comm)
        self._ips: list[str] | None = None
        self._world = MpiMeeting(self._comm, float(timeout_seconds))

    def get_local_ip(self) -> str:
        """Returns this machine's address, as its name is looked up.

        Raises:
            StrategyError: nothing knows the machine's name.
        """
        return local_ip()

    def _get_rank(self) -> int:
        return int(self._comm.Get_rank())

    def _get_size(self) -> int:
        return int(self._comm.Get_size())

    def _get_ips(self) -> list[str]:
        """Returns the address of every process's machine, by rank."""
        if self._ips is None:
            self._ips = all_ips(self._world)
        return self._ips

    def _all_gather(self, obj: Any) -> list[Any]:
        return self._world.gather("all", obj, "all_gather")

    def _finalize(self) -> None:
        """Ends MPI in this process: nothing of it may be called any more."""
        if not self.MPI.Is_finalized():
            self.MPI.Finalize()

    def _endpoints_of(self, ranks: Sequence[int]) -> list[str]:
        """Returns an endpoint for each of some processes; all call it."""
        return all_endpoints(self._world, self._get_ips(), ranks, self._get_rank())

    def _belong_to(self, group: GroupName, members: Sequence[int]) -> None:
        """Says who does what this process does."""
        self._world.add(group, members)
        self._meeting = self._world

    def _way(self) -> Meeting:
        self._check_role_generation()
        assert self._meeting is not None
        return self._meeting

    def _check_role_generation(self) -> bool:
        """Returns True once the role is known.

        Raises:
            NameError: it is not yet.
        """
        if not self._role_is_generated:
            raise NotReadyError("generate_role() should be called first", source=line_of_caller())
        return True

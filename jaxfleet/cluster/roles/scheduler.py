"""Roles of processes that mpirun or a cluster's scheduler started, and their endpoints."""

import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxfleet.cluster.bootstrap import detected_rank
from jaxfleet.cluster.rendezvous import FileRendezvous, GroupName, Rendezvous, Roster
from jaxfleet.cluster.rendezvous.mpi_rendezvous import MpiRendezvous, end_all_on_error, find_mpi
from jaxfleet.cluster.roles.base import (
    GroupedRoleMaker,
    KnownRoleMaker,
    RendezvousRoleMaker,
    Role,
    RoleMakerBase,
)
from jaxfleet.env import read_job
from jaxfleet.errors import NotReadyError, StrategyError
from jaxfleet.ops.user_frames import line_of_caller

_FIRST_DRAWN, _LAST_DRAWN, _LAST = 60001, 64000, 65535
_ALONE = "127.0.0.1"


def local_ip() -> str:
    """Returns this machine's address, by a lookup of its host name."""
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        what = f"the address of this machine, {name}, cannot be found: {error}"
        raise StrategyError(what, hint="name it in /etc/hosts or in DNS") from error


def all_ips(meeting: Rendezvous) -> list[str]:
    """Returns the machine address of every process, by rank; a collective call."""
    try:
        mine = local_ip()
    except StrategyError:
        mine = ""
    return _reachable(meeting.gather("all", (socket.gethostname(), mine), "addresses"))


def all_endpoints(
    meeting: Rendezvous, ips: Sequence[str], ranks: Sequence[int], rank: int
) -> list[str]:
    """Returns one endpoint for each of some processes; a collective call, with equal arguments.

    The first port is the one that fluid draws for this number of servers; from there on, processes
    of one machine each take a different free port.
    """
    port = None
    if rank in ranks:
        here = [each for each in ranks if ips[each] == ips[rank]]
        port = _free_port(drawn_port(len(ranks)) + here.index(rank), len(here))
    ports = meeting.gather("all", port, "ports")
    return [f"{ips[each]}:{ports[each]}" for each in ranks]


def drawn_port(number: int) -> int:
    """Returns the port that fluid draws for a number of servers: the same on all machines."""
    return random.Random(number).randint(_FIRST_DRAWN, _LAST_DRAWN)  # noqa: S311  # hides nothing


def _reachable(said: Sequence[tuple[str, str]]) -> list[str]:
    if len({host for host, _ in said}) == 1:  # a single machine needs no name
        return [ip or _ALONE for _, ip in said]
    for host, ip in said:
        if not ip or ip.startswith("127."):
            found = f"is {ip}, which no other machine reaches" if ip else "cannot be found"
            what = f"the address of machine {host} {found}"
            raise StrategyError(what, hint="name every machine in DNS, or in /etc/hosts of all")
    return [ip for _, ip in said]


def _free_port(first: int, step: int) -> int:
    for port in range(first, _LAST + 1, step):
        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind(("", port))
            except OSError:
                continue
            return port
    raise StrategyError(f"no port of this machine from {first} on, by {step}, is free")


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
            what = "no environment identifies this process: SLURM, Open MPI, Kubernetes (JobSet)"
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

    def _ensure_role(self) -> None:
        self.generate_role()

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

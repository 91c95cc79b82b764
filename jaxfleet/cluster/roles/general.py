"""GeneralRoleMaker: roles from the environment, with a rendezvous of the processes."""

import hashlib
from pathlib import Path

from jaxfleet.cluster.bootstrap import warn_of_no_secret
from jaxfleet.cluster.filesystems import FS, own_folder
from jaxfleet.cluster.rendezvous import (
    FileRendezvous,
    Folder,
    FsPath,
    NetworkRendezvous,
    Rendezvous,
    Roster,
)
from jaxfleet.cluster.roles.base import GroupedRoleMaker, KnownRoleMaker, Role
from jaxfleet.cluster.roles.cloud import JOB, SERVERS, WORKERS, Variables
from jaxfleet.env import read_job, read_meeting_dir
from jaxfleet.errors import ProgramError, StrategyError, UnsupportedError
from jaxfleet.ops.user_frames import line_of_caller, warn_at_caller
from jaxfleet.transport.secret import read_secret
from jaxfleet.transport.zmq.network import ZmqNetwork

_BLAME = "the environment is not that of a job"


class GeneralRoleMaker(GroupedRoleMaker, KnownRoleMaker):
    """Reads the role of a process from its environment, and finds the others.

    `TRAINING_ROLE` is `TRAINER` or `PSERVER`; `PADDLE_TRAINER_ENDPOINTS` and
    `PADDLE_PSERVERS_IP_PORT_LIST` list their endpoints. A trainer has `PADDLE_TRAINER_ID`; a server
    has `PADDLE_PSERVER_ID`, `POD_IP` and `PADDLE_PORT`, or `PADDLE_CURRENT_ENDPOINT`. Jobs that
    share a folder or an address have different `SYS_JOB_ID`s.

    The first query, or `generate_role`, waits until all processes are present: each group meets in
    a subfolder, `trainer`, `pserver` and `all`, and gathers, reduces and waits by files in it. A
    process that restarts ends the rendezvous for all. With `http_ip_port`, messages through
    trainer 0 replace the files, over encrypted connections if the job has a secret.

    Without a path, processes of one machine meet in the folder that `JAXFLEET_MEETING_DIR` names,
    or in one of this user's own.

    Args:
        hdfs_name: rejected without `fs`: mount HDFS, use another shared folder, or pass a file
            system that reaches it.
        hdfs_ugi: likewise.
        path: the folder, which every process sees.
        fs: a file system with the methods of `jaxfleet.cluster.filesystems.FS`, for the folder.
        iface: ignored with a warning: endpoints name the machines.
        http_ip_port: where trainer 0 listens and all meet, instead of a folder: `10.0.0.1:8900`.
        init_timeout_seconds: the longest wait for all to arrive.
        run_timeout_seconds: the longest wait at one gather.

    Raises:
        UnsupportedError: HDFS is requested.
        StrategyError: `http_ip_port` is not an address.
    """

    def __init__(
        self,
        hdfs_name: str = "",
        hdfs_ugi: str = "",
        path: str = "",
        *,
        fs: FS | None = None,
        iface: str = "",
        http_ip_port: str = "",
        init_timeout_seconds: float = 3600.0,
        run_timeout_seconds: float = 3600.0,
    ) -> None:
        super().__init__()
        if iface:
            what = "GeneralRoleMaker's iface has no effect here: endpoints name the machines"
            warn_at_caller(what)
        if http_ip_port and not _is_address(http_ip_port):
            what = f"GeneralRoleMaker: http_ip_port is {http_ip_port!r}, not an address and a port"
            raise StrategyError(what, source=line_of_caller(), hint='as in "10.0.0.1:8900"')
        if (hdfs_name or hdfs_ugi) and fs is None and not http_ip_port:
            what = f"GeneralRoleMaker meets in a folder, not in HDFS at {hdfs_name!r}"
            hint = "give path= a mounted folder that all see, or fs= a client of the file system"
            raise UnsupportedError(what, source=line_of_caller(), hint=hint)
        self._path, self._fs, self._address = path, fs, http_ip_port
        self._init_timeout_s = float(init_timeout_seconds)
        self._run_timeout_s = float(run_timeout_seconds)
        self._roster: Roster | None = None

    def generate_role(self) -> None:
        """Reads the environment and waits for the others, at the first call.

        Raises:
            KeyError: a variable is not set.
            ValueError: a variable is invalid, or contradicts another variable or process.
            ProgramError: there is no path, and the endpoints are on several machines.
            ConnectError: a process never arrived, or trainer 0 cannot listen at `http_ip_port`.
            StrategyError: another process has a different view of the job, or claims this rank.
        """
        if self._role_is_generated:
            return
        environment = Variables.read(_BLAME)
        roster = _read(environment)
        job = environment.values.get(JOB, "")
        meeting = self._at_address(roster, job) if self._address else self._in_folder(roster, job)
        meeting.join()
        self._meeting, self._roster = meeting, roster
        self._worker_endpoints = list(roster.workers)
        self._server_endpoints = list(roster.servers)
        self._role = Role.WORKER if roster.is_worker else Role.SERVER
        self._current_id, self._workers = roster.index, len(roster.workers)
        self._role_is_generated = True

    def _ensure_role(self) -> None:
        self.generate_role()

    def _at_address(self, roster: Roster, job: str) -> NetworkRendezvous:
        here = read_job()
        secret = None if here.secret_file is None else read_secret(here.secret_file)
        if secret is None and not here.insecure and roster.is_worker and roster.index == 0:
            warn_of_no_secret(self._address, "trainer 0")
        network = ZmqNetwork(secret=secret, share_memory=False, anywhere=True)
        return NetworkRendezvous(
            network,
            self._address,
            roster,
            connect_s=self._init_timeout_s,
            timeout_s=self._run_timeout_s,
            job=job or here.name,
        )

    def _in_folder(self, roster: Roster, job: str) -> FileRendezvous:
        return FileRendezvous(
            self._folder(roster),
            roster,
            connect_s=self._init_timeout_s,
            timeout_s=self._run_timeout_s,
            job=job,
        )

    def _folder(self, roster: Roster) -> Folder:
        if self._fs is not None and self._fs.need_upload_download():
            return FsPath(self._fs, self._path or "/jaxfleet_roles")
        if self._path:
            return Path(self._path)
        endpoints = [*roster.workers, *roster.servers]
        if len({endpoint.rpartition(":")[0] for endpoint in endpoints}) > 1:
            hint = "give path= a folder that every process sees, or http_ip_port= an address"
            what = "GeneralRoleMaker has no path to meet in, and the job has several machines"
            raise ProgramError(what, source=line_of_caller(), hint=hint)
        shared = read_meeting_dir() or own_folder("roles")
        return shared / hashlib.sha256(",".join(endpoints).encode()).hexdigest()[:16]

    def get_local_endpoint(self) -> str:
        known = self._known()
        return (known.workers if known.is_worker else known.servers)[known.index]

    def _get_rank(self) -> int:
        return self._known().rank

    def _get_size(self) -> int:
        return len(self._known().members("all"))

    def _way(self) -> Rendezvous:
        self.generate_role()
        assert self._meeting is not None
        return self._meeting

    def _known(self) -> Roster:
        self.generate_role()
        assert self._roster is not None
        return self._roster


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16


def _read(environment: Variables) -> Roster:
    servers, workers = environment.endpoints(SERVERS), environment.endpoints(WORKERS)
    role = environment.role(blame="TRAINING_ROLE must be PSERVER or TRAINER")
    if role == Role.SERVER:
        return Roster(workers, servers, is_worker=False, index=environment.server_index(servers))
    index = environment.worker_index(len(workers))
    return Roster(workers, servers, is_worker=True, index=index)

"""Roles that the environment says, of processes that meet in a folder."""

import hashlib
from pathlib import Path
from urllib.parse import quote

from jaxfleet.env import read_meeting_dir
from jaxfleet.errors import ProgramError, UnsupportedError
from jaxfleet.fleet.files import FS, own_folder
from jaxfleet.fleet.meeting import Folder, FolderMeeting, FsPath, Meeting, Roster
from jaxfleet.fleet.roles import variables as v
from jaxfleet.fleet.roles.grouped import GroupedRoleMaker
from jaxfleet.fleet.roles.role import Role
from jaxfleet.ops.frames import line_of_caller, warn_at_caller

_BLAME = "the environment is not that of a job"
_UNUSED = {
    "iface": "processes meet in a folder, and endpoints name the machines",
    "http_ip_port": "processes meet in a folder and no server of trainer 0; of several machines, "
    "give path= a folder that all see",
}


class GeneralRoleMaker(GroupedRoleMaker):
    """Reads the role of a process from its environment, and finds the others in a folder.

    `TRAINING_ROLE` says `TRAINER` or `PSERVER`, `PADDLE_TRAINER_ENDPOINTS` and
    `PADDLE_PSERVERS_IP_PORT_LIST` where they are. A trainer has `PADDLE_TRAINER_ID`; a server has
    `PADDLE_PSERVER_ID`, `POD_IP` and `PADDLE_PORT`, or `PADDLE_CURRENT_ENDPOINT`. Jobs that share a
    folder have different `SYS_JOB_ID`s.

    The first question, or `generate_role`, waits until all processes are there: each group meets in
    a folder of its own, `trainer`, `pserver` and `all`. Gathering, reducing and waiting go through
    files in them. A process that begins anew ends the meeting for all.

    Without a path, processes of one machine meet in the folder that `JAXFLEET_MEETING_DIR` names,
    or in one of this user's own.

    Args:
        hdfs_name: refused without `fs`: HDFS is mounted, another shared folder is given, or a file
            system that reaches it.
        hdfs_ugi: likewise.
        path: the folder, which every process sees.
        fs: a file system with the methods of `jaxfleet.fleet.files.FS`, on which the folder is.
        iface: warned of: files are read through no interface, and endpoints name the machines.
        http_ip_port: warned of: the original had trainer 0 answer there, and nothing does here;
            processes of one machine meet without, and those of several need a path.
        init_timeout_seconds: how long all may take to come.
        run_timeout_seconds: how long all may take to come to one gathering.

    Raises:
        UnsupportedError: HDFS is asked for.
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
        for name, given in (("iface", iface), ("http_ip_port", http_ip_port)):
            if given:
                warn_at_caller(f"GeneralRoleMaker's {name} has no effect here: {_UNUSED[name]}")
        if (hdfs_name or hdfs_ugi) and fs is None:
            what = f"GeneralRoleMaker meets in a folder, not in HDFS at {hdfs_name!r}"
            hint = "give path= a mounted folder that all see, or fs= a client of the file system"
            raise UnsupportedError(what, source=line_of_caller(), hint=hint)
        self._path, self._fs = path, fs
        self._init_timeout_s = float(init_timeout_seconds)
        self._run_timeout_s = float(run_timeout_seconds)
        self._roster: Roster | None = None

    def generate_role(self) -> None:
        """Reads the environment and waits for the others, the first time.

        Raises:
            KeyError: a variable is not set.
            ValueError: a variable has no such value, or contradicts another or another process.
            ProgramError: there is no path, and the endpoints are on several machines.
            ConnectError: a process never came.
        """
        if self._role_is_generated:
            return
        environment = v.Variables.read(_BLAME)
        roster = _read(environment)
        prefix = quote(environment.values.get(v.JOB, ""), safe="")
        meeting = FolderMeeting(
            self._folder(roster),
            roster,
            connect_s=self._init_timeout_s,
            timeout_s=self._run_timeout_s,
            prefix=prefix,
        )
        meeting.join()
        self._meeting, self._roster = meeting, roster
        self._worker_endpoints = list(roster.workers)
        self._server_endpoints = list(roster.servers)
        self._role = Role.WORKER if roster.is_worker else Role.SERVER
        self._current_id, self._role_is_generated = roster.index, True

    def _folder(self, roster: Roster) -> Folder:
        """Returns where processes meet.

        Raises:
            ProgramError: nothing says it, and they are on several machines.
        """
        if self._fs is not None and self._fs.need_upload_download():
            return FsPath(self._fs, self._path or "/jaxfleet_roles")
        if self._path:
            return Path(self._path)
        endpoints = [*roster.workers, *roster.servers]
        if len({endpoint.rpartition(":")[0] for endpoint in endpoints}) > 1:
            hint = "give path= a folder that every process sees"
            what = "GeneralRoleMaker has no path to meet in, and the job has several machines"
            raise ProgramError(what, source=line_of_caller(), hint=hint)
        shared = read_meeting_dir() or own_folder("roles")
        return shared / hashlib.sha256(",".join(endpoints).encode()).hexdigest()[:16]

    def is_worker(self) -> bool:
        return self._known().is_worker

    def is_server(self) -> bool:
        return not self._known().is_worker

    def is_first_worker(self) -> bool:
        known = self._known()
        return known.is_worker and known.index == 0

    def worker_num(self) -> int:
        return len(self._known().workers)

    def server_num(self) -> int:
        """Returns how many servers the job has."""
        return len(self._known().servers)

    def worker_index(self) -> int:
        return self._known().index

    def server_index(self) -> int:
        return self._known().index

    def get_trainer_endpoints(self) -> list[str]:
        return list(self._known().workers)

    def get_pserver_endpoints(self) -> list[str]:
        return list(self._known().servers)

    def get_local_endpoint(self) -> str:
        """Returns where this process is."""
        known = self._known()
        return (known.workers if known.is_worker else known.servers)[known.index]

    def to_string(self) -> str:
        self._known()
        return super().to_string()

    def _get_rank(self) -> int:
        return self._known().rank

    def _get_size(self) -> int:
        return len(self._known().members("all"))

    def _way(self) -> Meeting:
        self.generate_role()
        assert self._meeting is not None
        return self._meeting

    def _known(self) -> Roster:
        self.generate_role()
        assert self._roster is not None
        return self._roster


def _read(environment: v.Variables) -> Roster:
    """Returns who takes part, as the environment says it."""
    servers, workers = environment.endpoints(v.SERVERS), environment.endpoints(v.WORKERS)
    role = environment.role(blame="TRAINING_ROLE must be PSERVER or TRAINER")
    if role == Role.SERVER:
        return Roster(workers, servers, is_worker=False, index=environment.server_index(servers))
    index = environment.worker_index(len(workers))
    return Roster(workers, servers, is_worker=True, index=index)

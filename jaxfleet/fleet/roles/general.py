"""Roles that the environment says, of processes that meet in a folder."""

from pathlib import Path
from urllib.parse import quote

from jaxfleet.errors import ProgramError, UnsupportedError
from jaxfleet.fleet.meeting import FolderMeeting, Meeting, Roster
from jaxfleet.fleet.roles import variables as v
from jaxfleet.fleet.roles.grouped import GroupedRoleMaker
from jaxfleet.fleet.roles.role import Role
from jaxfleet.ops.frames import line_of_caller

_BLAME = "the environment is not that of a job"


class GeneralRoleMaker(GroupedRoleMaker):
    """Reads the role of a process from its environment, and finds the others in a folder.

    `TRAINING_ROLE` says `TRAINER` or `PSERVER`, `PADDLE_TRAINER_ENDPOINTS` and
    `PADDLE_PSERVERS_IP_PORT_LIST` where they are. A trainer has `PADDLE_TRAINER_ID`; a server has
    `PADDLE_PSERVER_ID`, `POD_IP` and `PADDLE_PORT`, or `PADDLE_CURRENT_ENDPOINT`. Jobs that share a
    folder have different `SYS_JOB_ID`s.

    The first question, or `generate_role`, waits until all processes are there: each group meets in
    a folder of its own, `trainer`, `pserver` and `all`. Gathering, reducing and waiting go through
    files in them. A process that begins anew ends the meeting for all.

    Args:
        hdfs_name: refused; HDFS is mounted, or another shared folder is given.
        hdfs_ugi: likewise.
        path: the folder, which every process sees.
        init_timeout_seconds: how long all may take to come.
        run_timeout_seconds: how long all may take to come to one gathering.

    Raises:
        UnsupportedError: HDFS is asked for.
        ProgramError: there is no path.
    """

    def __init__(
        self,
        hdfs_name: str = "",
        hdfs_ugi: str = "",
        path: str = "",
        *,
        init_timeout_seconds: float = 3600.0,
        run_timeout_seconds: float = 3600.0,
    ) -> None:
        super().__init__()
        if hdfs_name or hdfs_ugi:
            what = f"GeneralRoleMaker meets in a folder, not in HDFS at {hdfs_name!r}"
            hint = "give path= a folder that every process sees, such as a mounted file system"
            raise UnsupportedError(what, source=line_of_caller(), hint=hint)
        if not path:
            hint = "give a folder that every process sees"
            what = "GeneralRoleMaker has no path to meet in"
            raise ProgramError(what, source=line_of_caller(), hint=hint)
        self._path = Path(path)
        self._init_timeout_s = float(init_timeout_seconds)
        self._run_timeout_s = float(run_timeout_seconds)
        self._roster: Roster | None = None

    def generate_role(self) -> None:
        """Reads the environment and waits for the others, the first time.

        Raises:
            KeyError: a variable is not set.
            ValueError: a variable has no such value, or contradicts another or another process.
            ConnectError: somebody never came.
        """
        if self._role_is_generated:
            return
        environment = v.Variables.read(_BLAME)
        roster = _read(environment)
        prefix = quote(environment.values.get(v.JOB, ""), safe="")
        meeting = FolderMeeting(
            self._path,
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

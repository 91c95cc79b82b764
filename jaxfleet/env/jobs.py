"""The job in the environment: name, restarts, endpoints, machines, and role of this process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxfleet.env.variables import (
    CHECKPOINT_DIR,
    CURRENT,
    ENDPOINTS,
    INSECURE,
    IP,
    JOB,
    JOINS,
    LAUNCH_ID,
    MEETING_DIR,
    OF_CLUSTERS,
    PORT,
    RESTART,
    ROLE,
    ROLE_TOO,
    SAVE_DIR,
    SECRET_FILE,
    SERVER_ID,
    SERVER_RETURN,
    TRAINER_ENDPOINTS,
    TRAINER_ID,
    TRAINERS,
    get,
    read_number,
    read_seconds,
    refuse,
    whole,
)


@dataclass(frozen=True)
class JobName:
    """Identity of a job on its network.

    Attributes:
        name: `JAXFLEET_JOB`.
        secret_file: `JAXFLEET_SECRET_FILE`; any process with its content may take part.
        insecure: `JAXFLEET_INSECURE`; `1` lets a server start without a secret.
        save_dirs: `JAXFLEET_SAVE_DIR`; the folders, separated as in `PATH`, below which servers
            write and read the checkpoints that trainers name. Empty unless it is set.
    """

    name: str
    secret_file: Path | None
    insecure: bool = False
    save_dirs: tuple[Path, ...] = ()


def read_job() -> JobName:
    """Returns the job of this process, whatever specifies its role."""
    secret_file = get(SECRET_FILE)
    return JobName(
        get(JOB) or "default",
        Path(secret_file) if secret_file else None,
        insecure=get(INSECURE) not in {"", "0"},
        save_dirs=tuple(Path(word) for word in get(SAVE_DIR).split(os.pathsep) if word),
    )


def read_meeting_dir() -> Path | None:
    """Returns the folder in which processes of this job meet, if one is set."""
    folder = get(MEETING_DIR)
    return Path(folder) if folder else None


def ended_file(meeting: Path) -> Path:
    """Returns the file that a launch makes in the meeting folder when all servers have ended."""
    return meeting / "ended"


def has_job_ended() -> bool:
    """Whether the launch of this process reports that the servers of the job have ended."""
    meeting = read_meeting_dir()
    return meeting is not None and ended_file(meeting).exists()


def read_restart() -> int:
    """Returns how often this process or its whole job was restarted (`JAXFLEET_RESTART`)."""
    return read_number(RESTART, least=0, hint="leave it to the launch") if get(RESTART) else 0


def read_endpoints(name: str = ENDPOINTS) -> tuple[str, ...]:
    """Returns the endpoints in a variable, in their order."""
    endpoints = tuple(word.strip() for word in get(name).split(","))
    if endpoints == ("",):
        hint = "list where the servers listen: 10.0.0.1:6174,10.0.0.2:6174"
        refuse(name, "is not set", hint)
    for at, endpoint in enumerate(endpoints):
        _check_endpoint(name, endpoint)
        if endpoint in endpoints[:at]:
            refuse(name, f"names {endpoint} twice", "every process has its own endpoint")
    return endpoints


def _check_endpoint(name: str, endpoint: str) -> None:
    host, colon, port = endpoint.rpartition(":")
    if not host or not colon or any(letter.isspace() for letter in host):
        refuse(name, f"has {endpoint!r}, which is not an endpoint", "write 10.0.0.1:6174")
    if whole(port) is None or not 1 <= int(port) <= 65535:
        what = f"has {endpoint!r}, whose port is not one"
        refuse(name, what, "a port is a whole number from 1 to 65535")


def read_trainer_id(trainers: int, counted_by: str) -> int:
    """Returns the number of this trainer."""
    trainer = read_number(TRAINER_ID, least=0)
    if trainer >= trainers:
        said = trainers if counted_by == TRAINERS else f"a list of {trainers}"
        what = f"is {trainer}, but {counted_by} is {said}"
        refuse(TRAINER_ID, what, f"trainers are numbered from 0 to {trainers - 1}")
    return trainer


@dataclass(frozen=True)
class CloudNodes:
    """The machines of a job as PaddleCloud names them.

    Attributes:
        count: `PADDLE_TRAINERS_NUM`, 1 by default.
        names: `PADDLE_TRAINERS`, or None.
        own: `POD_IP`, or None.
        rank: `PADDLE_TRAINER_ID`: of this machine, or None.
        port: `PADDLE_PORT`, or None if it is not an integer.
        ports: `TRAINER_PORTS_NUM`: how many ports from there on are free; 0 by default.
    """

    count: int
    names: tuple[str, ...] | None
    own: str | None
    rank: int | None
    port: int | None
    ports: int


def read_cloud_nodes() -> CloudNodes:
    """Returns the machines of a job from PaddleCloud's variables."""
    names = tuple(word.strip() for word in get("PADDLE_TRAINERS").split(",") if word.strip())
    of_machines = "PaddleCloud sets it to a machine's number"
    return CloudNodes(
        count=read_number(TRAINERS, least=1) if get(TRAINERS) else 1,
        names=names or None,
        own=get(IP) or None,
        rank=read_number(TRAINER_ID, least=0, hint=of_machines) if get(TRAINER_ID) else None,
        port=whole(get(PORT)),
        ports=whole(get("TRAINER_PORTS_NUM")) or 0,
    )


_SYSTEM_JOB = "SYS_JOB_ID"
MOVING = "moving"  # a folder beside the servers' own checkpoints: what goes to other servers
_ROLES: Mapping[str, Literal["trainer", "pserver"]] = {"TRAINER": "trainer", "PSERVER": "pserver"}


@dataclass(frozen=True)
class PserverRole:
    """Role of this process in a job with servers, and the job's endpoints.

    Attributes:
        role: `TRAINING_ROLE`, or `PADDLE_TRAINING_ROLE`: `TRAINER` or `PSERVER`.
        trainers: `PADDLE_TRAINERS_NUM`; the number of trainers.
        endpoints: `PADDLE_PSERVERS_IP_PORT_LIST`; where the servers listen, in their order.
        trainer_id: `PADDLE_TRAINER_ID`; a trainer's number from 0, None for a server.
        current_endpoint: `PADDLE_CURRENT_ENDPOINT`, or `POD_IP` and `PADDLE_PORT`; a server's own,
            None for a trainer.
        job: `JAXFLEET_JOB`; distinguishes jobs that share a network.
        secret_file: `JAXFLEET_SECRET_FILE`; any process with its content may take part.
        checkpoint_dir: `JAXFLEET_CHECKPOINT_DIR`; where servers keep checkpoints of their own.
        server_return_s: `JAXFLEET_SERVERS_RETURN`; how long trainers wait for a lost server.
        meeting_dir: `JAXFLEET_MEETING_DIR`; the default rendezvous of the processes.
        insecure: `JAXFLEET_INSECURE`; a server may start without a secret.
        save_dirs: `JAXFLEET_SAVE_DIR`; folders for checkpoints that trainers save and restore.
        launch_id: `JAXFLEET_LAUNCH_ID`; distinguishes launches of the job.
        restart: `JAXFLEET_RESTART`; how often this process, alone or with the whole job, was
            started again: a trainer's life, the greater the newer.
        joins: `JAXFLEET_JOINS`; this process is one more trainer of a job that runs already, which
            gives it its number: `trainer_id` may be any, and `trainers` that of the job's start.
    """

    role: Literal["trainer", "pserver"]
    trainers: int
    endpoints: tuple[str, ...]
    trainer_id: int | None = None
    current_endpoint: str | None = None
    job: str = "default"
    secret_file: Path | None = None
    checkpoint_dir: Path | None = None
    server_return_s: float = 0.0
    meeting_dir: Path | None = None
    insecure: bool = False
    save_dirs: tuple[Path, ...] = ()
    launch_id: str | None = None
    restart: int = 0
    joins: bool = False

    @property
    def own_checkpoints(self) -> Path | None:
        """Checkpoint folder of this job's servers; one per job, so no job resumes another's."""
        return None if self.checkpoint_dir is None else self.checkpoint_dir / self.job

    @property
    def server_id(self) -> int | None:
        """The server's index among the endpoints, None for a trainer."""
        here = self.current_endpoint
        return None if here is None else self.endpoints.index(here)


def read_cluster() -> PserverRole | None:
    """Returns the role of this process, or None if the environment specifies none."""
    role = _read_role()
    if role is None:
        return None
    endpoints, trainers = read_endpoints(), read_number(TRAINERS, least=1)
    job, checkpoint_dir = read_job(), get(CHECKPOINT_DIR)
    joins, trainer_id = get(JOINS) not in {"", "0"}, None
    if role == "trainer":
        trainer_id = (
            read_number(TRAINER_ID, least=0) if joins else read_trainer_id(trainers, TRAINERS)
        )
    return PserverRole(
        role=role,
        trainers=trainers,
        endpoints=endpoints,
        trainer_id=trainer_id,
        current_endpoint=_read_current(endpoints) if role == "pserver" else None,
        job=job.name,
        secret_file=job.secret_file,
        checkpoint_dir=Path(checkpoint_dir) if checkpoint_dir else None,
        server_return_s=read_seconds(SERVER_RETURN),
        meeting_dir=read_meeting_dir(),
        insecure=job.insecure,
        save_dirs=job.save_dirs,
        launch_id=get(LAUNCH_ID) or None,
        restart=read_restart(),
        joins=joins,
    )


def read_roles() -> Mapping[str, str]:
    """Returns the non-empty variables that role makers read, by name.

    Role makers read them on demand, and each needs a different subset.
    """
    names = (*(ROLE, ROLE_TOO, ENDPOINTS, TRAINERS, TRAINER_ID, CURRENT, IP, PORT),
             *(SERVER_ID, TRAINER_ENDPOINTS, _SYSTEM_JOB))  # fmt: skip
    return {name: value for name in names if (value := get(name))}


def cluster_environment(cluster: PserverRole) -> dict[str, str]:
    """Returns the whole environment of a child with this role, based on this process's.

    Variables of any other role or job are removed.
    """
    kept = {name: value for name, value in os.environ.items() if name not in OF_CLUSTERS}
    address, _, port = (cluster.current_endpoint or "").rpartition(":")
    settings: Mapping[str, object] = {
        IP: address or None,  # fluid's role makers find a server's index by these
        PORT: port or None,
        SERVER_ID: cluster.server_id,
        ROLE: cluster.role.upper(),
        ROLE_TOO: cluster.role.upper(),
        ENDPOINTS: ",".join(cluster.endpoints),
        TRAINERS: cluster.trainers,
        TRAINER_ID: cluster.trainer_id,
        CURRENT: cluster.current_endpoint,
        JOB: cluster.job,
        SECRET_FILE: cluster.secret_file,
        CHECKPOINT_DIR: cluster.checkpoint_dir,
        SERVER_RETURN: cluster.server_return_s or None,
        MEETING_DIR: cluster.meeting_dir,
        INSECURE: "1" if cluster.insecure else None,
        LAUNCH_ID: cluster.launch_id,
        RESTART: cluster.restart or None,
        JOINS: "1" if cluster.joins else None,
        SAVE_DIR: os.pathsep.join(map(str, cluster.save_dirs)) or None,
    }
    return kept | {name: str(value) for name, value in settings.items() if value is not None}


_COMPILED = {
    "JAX_COMPILATION_CACHE_DIR": "",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def compiled_code_environment(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Adds JAX's settings for keeping compiled code in a folder, unless the user has some."""
    if any(environment.get(name) for name in _COMPILED):
        return dict(environment)
    return {**environment, **_COMPILED, "JAX_COMPILATION_CACHE_DIR": str(folder)}


def enter_environment(environment: Mapping[str, str]) -> None:
    """Makes this the environment of this process, which waited for its role."""
    os.environ.clear()
    os.environ.update(environment)


def _read_role() -> Literal["trainer", "pserver"] | None:
    role, too = get(ROLE), get(ROLE_TOO)
    if role and too and role != too:
        what = f"is {role}, but {ROLE_TOO} is {too}"
        refuse(ROLE, what, "set one of the two, or both to the same role")
    said = role or too
    if said and said not in _ROLES:
        what = f"is {said!r}, which is not a role"
        refuse(ROLE if role else ROLE_TOO, what, "a role is TRAINER or PSERVER")
    return _ROLES.get(said)


def _read_current(endpoints: tuple[str, ...]) -> str:
    current, address, port = get(CURRENT), get(IP), get(PORT)
    made = f"{address}:{port}" if address and port else ""
    if not current and not made:
        missing = CURRENT if not address and not port else PORT if address else IP
        hint = f"a server needs {CURRENT}, or {IP} and {PORT}"
        refuse(missing, "is not set", hint)
    name = CURRENT if current else f"{IP} with {PORT}"
    here = current or made
    if here not in endpoints:
        what = f"is {here}, which is not in {ENDPOINTS}: {', '.join(endpoints)}"
        refuse(name, what, "write the endpoint as it stands in the list")
    return here

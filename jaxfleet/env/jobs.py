"""The job in the environment: name, restarts, endpoints, and machines."""

import os
from dataclasses import dataclass
from pathlib import Path

from jaxfleet.env.variables import (
    ENDPOINTS,
    INSECURE,
    IP,
    JOB,
    MEETING_DIR,
    PORT,
    RESTART,
    SAVE_DIR,
    SECRET_FILE,
    TRAINER_ID,
    TRAINERS,
    get,
    read_number,
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


def read_restart() -> int:
    """Returns the number of restarts of this job (`JAXFLEET_RESTART`)."""
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
        refuse(name, f"has {endpoint!r}, which is no endpoint", "write 10.0.0.1:6174")
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

"""Reads the environment: the only module that does.

Every variable is listed here with what it means; everything else takes values as arguments.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from jaxfleet.errors import StrategyError

_DUMP_DIR = "JAXFLEET_DUMP_DIR"
_DUMP_SOURCE = "JAXFLEET_DUMP_SOURCE"
_CACHE_DIR = "JAXFLEET_CACHE_DIR"
_TRACE_DIR = "JAXFLEET_TRACE_DIR"
_METRICS_PORT = "JAXFLEET_METRICS_PORT"

_ROLE = "TRAINING_ROLE"
_ROLE_TOO = "PADDLE_TRAINING_ROLE"  # what fluid's documents and collective jobs call it
_ENDPOINTS = "PADDLE_PSERVERS_IP_PORT_LIST"
_TRAINERS = "PADDLE_TRAINERS_NUM"
_TRAINER_ID = "PADDLE_TRAINER_ID"
_CURRENT = "PADDLE_CURRENT_ENDPOINT"
_IP = "POD_IP"
_PORT = "PADDLE_PORT"
_JOB = "JAXFLEET_JOB"
_SECRET_FILE = "JAXFLEET_SECRET_FILE"
_CHECKPOINT_DIR = "JAXFLEET_CHECKPOINT_DIR"
_SERVER_RETURN = "JAXFLEET_SERVERS_RETURN"
_MEETING_DIR = "JAXFLEET_MEETING_DIR"
_RPC_DEADLINE = "FLAGS_rpc_deadline"
_DEADLINE_MS = 180_000
_SERVER_ID = "PADDLE_PSERVER_ID"
_TRAINER_ENDPOINTS = "PADDLE_TRAINER_ENDPOINTS"
_SYSTEM_JOB = "SYS_JOB_ID"
_LAST_PORT = 65535
_CPU_NUM = "CPU_NUM"
_GPUS = "FLAGS_selected_gpus"
_XLA_FLAGS = "XLA_FLAGS"
_RESTART = "JAXFLEET_RESTART"
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_PLATFORMS = "JAX_PLATFORMS"
_CPU_DEVICES = "--xla_force_host_platform_device_count"
_PROXIES = ("http_proxy", "https_proxy")
_NO_PROXY = ("no_grpc_proxy", "no_proxy")  # whom gRPC reaches without one; it reads the first
_OF_CLUSTERS = (
    *(_ROLE, _ROLE_TOO, _ENDPOINTS, _TRAINERS, _TRAINER_ID, _CURRENT, _IP, _PORT),
    *(_JOB, _SECRET_FILE, _CHECKPOINT_DIR, _SERVER_RETURN, _TRAINER_ENDPOINTS, _RESTART),
    *(_SERVER_ID, _MEETING_DIR),
)


@dataclass(frozen=True)
class Environment:
    """Holds what the environment asked for.

    Attributes:
        dump_dir: `JAXFLEET_DUMP_DIR`; where every pipeline writes what its passes did.
        dump_source: `JAXFLEET_DUMP_SOURCE`; `1` adds the user's source lines to those dumps.
    """

    dump_dir: Path | None
    dump_source: bool


def read_environment() -> Environment:
    """Returns the environment's settings, as they are now."""
    dump_dir = os.environ.get(_DUMP_DIR)
    return Environment(
        dump_dir=Path(dump_dir) if dump_dir else None,
        dump_source=os.environ.get(_DUMP_SOURCE, "0") not in {"", "0"},
    )


def read_cache_dir() -> Path | None:
    """Returns where compiled functions are kept for the user's later processes, None for nowhere.

    `JAXFLEET_CACHE_DIR` says where (an empty one: nowhere); else it is `jaxfleet` in the user's
    cache folder: `XDG_CACHE_HOME`, or `.cache` at home.
    """
    given = os.environ.get(_CACHE_DIR)
    if given is not None:
        return Path(given) if given else None
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(cache or Path.home() / ".cache") / "jaxfleet"
    except RuntimeError:  # a user without a home
        return None


def read_trace_dir() -> Path | None:
    """Returns where every process writes what it did when (`JAXFLEET_TRACE_DIR`), None for not."""
    return Path(_get(_TRACE_DIR)) if _get(_TRACE_DIR) else None


def read_metrics_port(server: int) -> int | None:
    """Returns the port at which a server gives its metrics, None if it gives none.

    Args:
        server: its number: `JAXFLEET_METRICS_PORT` is server 0's, the others' follow.

    Raises:
        StrategyError: it is no port.
    """
    if not _get(_METRICS_PORT):
        return None
    port = _read_number(_METRICS_PORT, least=1, hint="9464 is Prometheus's usual one") + server
    if port > _LAST_PORT:
        _refuse(_METRICS_PORT, f"makes server {server}'s port {port}", "the last is 65535")
    return port


def rpc_threads(what: str) -> int:
    """Returns `FLAGS_rpc_<what>_thread_num`: how many threads fluid would use; 12 unless set.

    Raises:
        StrategyError: it is no number.
    """
    name = f"FLAGS_rpc_{what}_thread_num"
    value = os.environ.get(name, "12")
    if not value.isdecimal():
        raise StrategyError(f"{name} is '{value}', and must be a number")
    return int(value)


def preset_flag(name: str) -> str | None:
    """Returns what the environment says of one of fluid's flags, as `FLAGS_<name>`."""
    return _get(f"FLAGS_{name}") or None


def read_cpu_num() -> int | None:
    """Returns how many devices fluid scripts take the CPU for (`CPU_NUM`), None if unset.

    Raises:
        StrategyError: it is no number from 1 on.
    """
    hint = "it is how many devices the CPU stands in for"
    return _read_number(_CPU_NUM, least=1, hint=hint) if _get(_CPU_NUM) else None


def read_selected_gpus() -> tuple[int, ...] | None:
    """Returns the numbers of the GPUs to use (`FLAGS_selected_gpus`), None for all.

    Raises:
        StrategyError: one of them is no number.
    """
    words = [word.strip() for word in _get(_GPUS).split(",") if word.strip()]
    numbers = [_whole(word) for word in words]
    for word, number in zip(words, numbers, strict=True):
        if number is None:
            _refuse(_GPUS, f"has {word!r}, which is no number", "write 0,1")
    return tuple(number for number in numbers if number is not None) or None


def says_how_many_cpu_devices() -> bool:
    """Tells whether `XLA_FLAGS` fixes the number of CPU devices."""
    return "xla_force_host_platform_device_count" in _get(_XLA_FLAGS)


@contextmanager
def dumping_to(folder: Path, *, source: bool = False) -> Iterator[None]:
    """Sets the environment's dump settings while it lasts, for this process and its children."""
    settings = {_DUMP_DIR: str(folder), _DUMP_SOURCE: "1" if source else "0"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass(frozen=True)
class Cluster:
    """Holds which process of a job this one is, and who the others are.

    Attributes:
        role: `TRAINING_ROLE`, or `PADDLE_TRAINING_ROLE`: `TRAINER` or `PSERVER`.
        trainers: `PADDLE_TRAINERS_NUM`; how many trainers the job has.
        endpoints: `PADDLE_PSERVERS_IP_PORT_LIST`; where the servers listen, in their order.
        trainer_id: `PADDLE_TRAINER_ID`; a trainer's number from 0, None for a server.
        current_endpoint: `PADDLE_CURRENT_ENDPOINT`, or `POD_IP` and `PADDLE_PORT`; a server's own,
            None for a trainer.
        job: `JAXFLEET_JOB`; what tells jobs apart that share a network.
        secret_file: `JAXFLEET_SECRET_FILE`; who knows what it holds may take part.
        checkpoint_dir: `JAXFLEET_CHECKPOINT_DIR`; where servers keep checkpoints of their own.
        server_return_s: `JAXFLEET_SERVERS_RETURN`; how long trainers wait for a server that went.
        meeting_dir: `JAXFLEET_MEETING_DIR`; where processes meet if by no other way.
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

    @property
    def own_checkpoints(self) -> Path | None:
        """Where the servers of this job keep theirs: no job goes on from another's."""
        return None if self.checkpoint_dir is None else self.checkpoint_dir / self.job

    @property
    def server_id(self) -> int | None:
        """The server's place among the endpoints, None for a trainer."""
        here = self.current_endpoint
        return None if here is None else self.endpoints.index(here)


def read_cluster() -> Cluster | None:
    """Returns which process of which job this is, or None where the environment names no role.

    Raises:
        StrategyError: a variable is missing, is no such value, or contradicts another.
    """
    role = _read_role()
    if role is None:
        return None
    endpoints, trainers = _read_endpoints(), _read_number(_TRAINERS, least=1)
    secret_file, checkpoint_dir = _get(_SECRET_FILE), _get(_CHECKPOINT_DIR)
    return Cluster(
        role=role,
        trainers=trainers,
        endpoints=endpoints,
        trainer_id=_read_trainer_id(trainers, _TRAINERS) if role == "trainer" else None,
        current_endpoint=_read_current(endpoints) if role == "pserver" else None,
        job=_get(_JOB) or "default",
        secret_file=Path(secret_file) if secret_file else None,
        checkpoint_dir=Path(checkpoint_dir) if checkpoint_dir else None,
        server_return_s=_read_seconds(_SERVER_RETURN),
        meeting_dir=read_meeting_dir(),
    )


def read_roles() -> Mapping[str, str]:
    """Returns what is set of the variables that role makers read, by name; an empty one is not.

    Role makers read them when a script asks, and each has its own idea of which it needs.
    """
    names = (*(_ROLE, _ROLE_TOO, _ENDPOINTS, _TRAINERS, _TRAINER_ID, _CURRENT, _IP, _PORT),
             *(_SERVER_ID, _TRAINER_ENDPOINTS, _SYSTEM_JOB))  # fmt: skip
    return {name: value for name in names if (value := _get(name))}


def read_meeting_dir() -> Path | None:
    """Returns the folder in which processes of this job meet, None where none is said."""
    folder = _get(_MEETING_DIR)
    return Path(folder) if folder else None


@dataclass(frozen=True)
class JobName:
    """Holds what tells a job from others on its network.

    Attributes:
        name: `JAXFLEET_JOB`.
        secret_file: `JAXFLEET_SECRET_FILE`; who knows what it holds may take part.
    """

    name: str
    secret_file: Path | None


def read_job() -> JobName:
    """Returns of which job this process is, whoever tells it its role."""
    secret_file = _get(_SECRET_FILE)
    return JobName(_get(_JOB) or "default", Path(secret_file) if secret_file else None)


def read_rpc_deadline_ms() -> int:
    """Returns `FLAGS_rpc_deadline`: how long fluid's programs wait for peers, in milliseconds.

    Raises:
        StrategyError: it is not a positive whole number.
    """
    text = _get(_RPC_DEADLINE)
    found = _whole(text) if text else _DEADLINE_MS
    if not found:
        _refuse(_RPC_DEADLINE, f"is {text!r}, not a time", "it is milliseconds, such as 180000")
    return found


def cluster_environment(cluster: Cluster) -> dict[str, str]:
    """Returns the whole environment of a child with this role: this process's, and the role's.

    What this process's environment says of another role or job is not in it.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _OF_CLUSTERS}
    address, _, port = (cluster.current_endpoint or "").rpartition(":")
    settings: Mapping[str, object] = {
        _IP: address or None,  # fluid's role makers find a server's place by these
        _PORT: port or None,
        _SERVER_ID: cluster.server_id,
        _ROLE: cluster.role.upper(),
        _ROLE_TOO: cluster.role.upper(),
        _ENDPOINTS: ",".join(cluster.endpoints),
        _TRAINERS: cluster.trainers,
        _TRAINER_ID: cluster.trainer_id,
        _CURRENT: cluster.current_endpoint,
        _JOB: cluster.job,
        _SECRET_FILE: cluster.secret_file,
        _CHECKPOINT_DIR: cluster.checkpoint_dir,
        _SERVER_RETURN: cluster.server_return_s or None,
        _MEETING_DIR: cluster.meeting_dir,
    }
    return kept | {name: str(value) for name, value in settings.items() if value is not None}


@dataclass(frozen=True)
class Rank:
    """Holds which process of a collective job one is.

    Attributes:
        rank: `PADDLE_TRAINER_ID`.
        endpoints: `PADDLE_TRAINER_ENDPOINTS`; one of each rank, in their order.
        job: `JAXFLEET_JOB`.
        secret_file: `JAXFLEET_SECRET_FILE`.
        restart: `JAXFLEET_RESTART`; how often the job has been started again.
        gpus: `FLAGS_selected_gpus`; the GPUs that are this rank's, none to leave that open.
        cpu_devices: how many devices the CPU stands in for (`XLA_FLAGS`); None leaves that open.
        proxies: whether it may reach others through a proxy; fluid's launch takes that away.
    """

    rank: int
    endpoints: tuple[str, ...]
    job: str
    secret_file: Path | None = None
    restart: int = 0
    gpus: tuple[int, ...] = ()
    cpu_devices: int | None = None
    proxies: bool = True


def read_rank() -> Rank | None:
    """Returns which rank of which collective job this is; None where the environment names none.

    `PADDLE_TRAINERS_NUM` and `PADDLE_CURRENT_ENDPOINT` need not be there, but must agree if they
    are; the latter stands in for a `PADDLE_TRAINER_ID` that is not.

    Raises:
        StrategyError: a variable is missing, is no such value, or contradicts another.
    """
    if not _get(_TRAINER_ENDPOINTS):
        return None
    endpoints, current = _read_endpoints(_TRAINER_ENDPOINTS), _get(_CURRENT)
    if _get(_TRAINERS) and _read_number(_TRAINERS, least=1) != len(endpoints):
        what = f"is {_get(_TRAINERS)}, but {_TRAINER_ENDPOINTS} has {len(endpoints)} endpoints"
        _refuse(_TRAINERS, what, "give every rank one endpoint")
    if current and current not in endpoints:
        what = f"is {current}, which is not in {_TRAINER_ENDPOINTS}: {', '.join(endpoints)}"
        _refuse(_CURRENT, what, "write the endpoint as it stands in the list")
    if current and not _get(_TRAINER_ID):
        rank = endpoints.index(current)
    else:
        rank = _read_trainer_id(len(endpoints), _TRAINER_ENDPOINTS)
    if current and endpoints[rank] != current:
        what = f"is {current}, but rank {rank} of {_TRAINER_ENDPOINTS} is {endpoints[rank]}"
        _refuse(_CURRENT, what, f"it is the one that {_TRAINER_ID} counts to, from 0")
    job, gpus = read_job(), read_selected_gpus() or ()
    return Rank(rank, endpoints, job.name, job.secret_file, read_restart(), gpus)


def rank_environment(rank: Rank) -> dict[str, str]:
    """Returns the whole environment of a child that is this rank: this process's, and its place."""
    left_out = _OF_CLUSTERS if rank.proxies else (*_OF_CLUSTERS, *_PROXIES)
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    settings: Mapping[str, object] = {
        _ROLE: "TRAINER",
        _ROLE_TOO: "TRAINER",
        _TRAINER_ENDPOINTS: ",".join(rank.endpoints),
        _CURRENT: rank.endpoints[rank.rank],
        _TRAINER_ID: rank.rank,
        _TRAINERS: len(rank.endpoints),
        _JOB: rank.job,
        _SECRET_FILE: rank.secret_file,
        _RESTART: rank.restart,
        _GPUS: ",".join(map(str, rank.gpus)) or None,
    }
    if any(name in kept for name in ("grpc_proxy", *_PROXIES)):
        settings = {**settings, _NO_PROXY[0]: _without_proxy(rank.endpoints)}
    if rank.cpu_devices is not None:
        others = [word for word in _get(_XLA_FLAGS).split() if not word.startswith(_CPU_DEVICES)]
        settings = {
            **settings,
            _XLA_FLAGS: " ".join([*others, f"{_CPU_DEVICES}={rank.cpu_devices}"]),
            _PLATFORMS: _get(_PLATFORMS) or "cpu",  # else a GPU would be taken before them
        }
    return kept | {name: str(value) for name, value in settings.items() if value is not None}


def _without_proxy(endpoints: tuple[str, ...]) -> str:
    """Adds the ranks' hosts to those that gRPC reaches without a proxy: one would refuse them."""
    before = _get(_NO_PROXY[0]) or _get(_NO_PROXY[1])
    hosts = dict.fromkeys(endpoint.rpartition(":")[0] for endpoint in endpoints)
    return ",".join([*([before] if before else []), *hosts])


def read_restart() -> int:
    """Returns how often this job has been started again (`JAXFLEET_RESTART`).

    Raises:
        StrategyError: it is no number.
    """
    return _read_number(_RESTART, least=0, hint="leave it to the launch") if _get(_RESTART) else 0


def read_visible_gpus() -> tuple[str, ...] | None:
    """Returns what `CUDA_VISIBLE_DEVICES` names; None where it is not set, so all are seen."""
    if _VISIBLE_GPUS not in os.environ:
        return None
    return tuple(word.strip() for word in _get(_VISIBLE_GPUS).split(",") if word.strip())


def wants_gpus() -> bool:
    """Tells whether jax may take GPUs, by `JAX_PLATFORMS`."""
    wanted = _get(_PLATFORMS).lower().split(",")
    return wanted == [""] or not {"cuda", "gpu"}.isdisjoint(wanted)


@dataclass(frozen=True)
class CloudNodes:
    """Holds the machines of a job as PaddleCloud names them.

    Attributes:
        count: `PADDLE_TRAINERS_NUM`, 1 unless set.
        names: `PADDLE_TRAINERS`, None where it is not set.
        own: `POD_IP`, or None.
        rank: `PADDLE_TRAINER_ID`: of this machine, or None.
        port: `PADDLE_PORT`, or None where it is no number.
        ports: `TRAINER_PORTS_NUM`: how many ports from there on are free; 0 unless set.
    """

    count: int
    names: tuple[str, ...] | None
    own: str | None
    rank: int | None
    port: int | None
    ports: int


def read_cloud_nodes() -> CloudNodes:
    """Returns what PaddleCloud says of the machines of a job.

    Raises:
        StrategyError: a number is none.
    """
    names = tuple(word.strip() for word in _get("PADDLE_TRAINERS").split(",") if word.strip())
    of_machines = "PaddleCloud sets it to a machine's number"
    return CloudNodes(
        count=_read_number(_TRAINERS, least=1) if _get(_TRAINERS) else 1,
        names=names or None,
        own=_get(_IP) or None,
        rank=_read_number(_TRAINER_ID, least=0, hint=of_machines) if _get(_TRAINER_ID) else None,
        port=_whole(_get(_PORT)),
        ports=_whole(_get("TRAINER_PORTS_NUM")) or 0,
    )


def _get(name: str) -> str:
    """Returns a variable without the space around it; an unset one is as an empty one."""
    return os.environ.get(name, "").strip()


def _refuse(name: str, what: str, hint: str) -> NoReturn:
    raise StrategyError(f"environment variable {name} {what}", hint=hint)


def _read_role() -> Literal["trainer", "pserver"] | None:
    role, too = _get(_ROLE), _get(_ROLE_TOO)
    if role and too and role != too:
        what = f"is {role}, but {_ROLE_TOO} is {too}"
        _refuse(_ROLE, what, "set one of the two, or both to the same role")
    match role or too:
        case "":
            return None
        case "TRAINER":
            return "trainer"
        case "PSERVER":
            return "pserver"
        case other:
            what = f"is {other!r}, which is no role"
            _refuse(_ROLE if role else _ROLE_TOO, what, "a role is TRAINER or PSERVER")


def _read_endpoints(name: str = _ENDPOINTS) -> tuple[str, ...]:
    endpoints = tuple(word.strip() for word in _get(name).split(","))
    if endpoints == ("",):
        hint = "list where the servers listen: 10.0.0.1:6174,10.0.0.2:6174"
        _refuse(name, "is not set", hint)
    for at, endpoint in enumerate(endpoints):
        _check_endpoint(name, endpoint)
        if endpoint in endpoints[:at]:
            _refuse(name, f"names {endpoint} twice", "every process has its own endpoint")
    return endpoints


def _check_endpoint(name: str, endpoint: str) -> None:
    host, colon, port = endpoint.rpartition(":")
    if not host or not colon or any(letter.isspace() for letter in host):
        _refuse(name, f"has {endpoint!r}, which is no endpoint", "write 10.0.0.1:6174")
    if _whole(port) is None or not 1 <= int(port) <= 65535:
        what = f"has {endpoint!r}, whose port is not one"
        _refuse(name, what, "a port is a whole number from 1 to 65535")


def _read_trainer_id(trainers: int, counted_by: str) -> int:
    trainer = _read_number(_TRAINER_ID, least=0)
    if trainer >= trainers:
        said = trainers if counted_by == _TRAINERS else f"a list of {trainers}"
        what = f"is {trainer}, but {counted_by} is {said}"
        _refuse(_TRAINER_ID, what, f"trainers are numbered from 0 to {trainers - 1}")
    return trainer


def _read_current(endpoints: tuple[str, ...]) -> str:
    current, address, port = _get(_CURRENT), _get(_IP), _get(_PORT)
    made = f"{address}:{port}" if address and port else ""
    if not current and not made:
        missing = _CURRENT if not address and not port else _PORT if address else _IP
        hint = f"a server needs {_CURRENT}, or {_IP} and {_PORT}"
        _refuse(missing, "is not set", hint)
    name = _CURRENT if current else f"{_IP} with {_PORT}"
    here = current or made
    if here not in endpoints:
        what = f"is {here}, which is not in {_ENDPOINTS}: {', '.join(endpoints)}"
        _refuse(name, what, "write the endpoint as it stands in the list")
    return here


def _read_number(name: str, *, least: int, hint: str = "every process of a job needs it") -> int:
    text = _get(name)
    number = _whole(text)
    if number is None or number < least:
        what = f"is {text!r}, not a whole number from {least} on" if text else "is not set"
        _refuse(name, what, hint)
    return number


def _whole(text: str) -> int | None:
    """Returns the number that plain digits write, None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _read_seconds(name: str) -> float:
    text = _get(name)
    try:
        seconds = float(text or 0.0)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        _refuse(name, f"is {text!r}, not a time", "it is a number of seconds, such as 60")
    return seconds

"""What a launch is asked to run: the commands, how many of each, and what becomes of failures."""

import math
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path

from jaxfleet.errors import StrategyError
from jaxfleet.launch.nodes import Nodes

# A server that cannot listen because somebody else does ends with this status, and is started
# again without being counted as dead.
PORT_TAKEN = 98

_MOST_PROCESSES = 1024
_MOST_PORT = 65536


def _new_name() -> str:
    return f"job-{secrets.token_hex(4)}"


@dataclass(frozen=True, kw_only=True)
class AnyJob:
    """Says how the processes of a job are run on this machine, whatever they do.

    Attributes:
        name: the job's id, which its processes tell each other; a new one unless given, which a
            job on several machines needs.
        nodes: the job's machines.
        port: the first port that its processes listen at, the others follow; 0 finds free ones,
            on one machine, and is 6170 on several.
        log_dir: where each process's output is written too, each to a file of its own.
        secret_file: what the processes of the job share and nobody else may read; a new one unless
            given, which a job on several machines needs.
        insecure: the job has no secret: every user who reaches its ports can take part in it.
        timeout_s: how long the job may take in all; None is as long as it likes.
        grace_s: how long a process may take to end once it was told to.
        threads: how many threads each process computes with; None leaves that to XLA.
        quiet: whether the launch says nothing of its own but what failed.
    """

    name: str = field(default_factory=_new_name)
    nodes: Nodes = field(default_factory=Nodes)
    port: int = 0
    log_dir: Path | None = None
    secret_file: Path | None = None
    insecure: bool = False
    timeout_s: float | None = None
    grace_s: float = 5.0
    threads: int | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.threads is not None:
            check_range("threads", self.threads, 1, math.inf)
        for name in ("timeout_s", "grace_s"):
            check_seconds(name, getattr(self, name))
        if self.secret_file is not None and not self.secret_file.is_file():
            hint = "make it first; whoever can read it can take part in the job"
            raise StrategyError(f"there is no secret file {self.secret_file}", hint=hint)
        if self.secret_file is not None and self.insecure:
            what = f"the job has the secret file {self.secret_file}, and is to be insecure"
            raise StrategyError(what, hint="leave one of --secret-file and --insecure out")
        if self.nodes.several and self.secret_file is None and not self.insecure:
            hint = "give --secret-file FILE, the same on every machine; --insecure does without"
            raise StrategyError("a job on several machines has no secret", hint=hint)

    @property
    def secret(self) -> Path | None:
        """The secret's file, wherever a process of the job is."""
        return None if self.secret_file is None else self.secret_file.resolve()


@dataclass(frozen=True, kw_only=True)
class Job(AnyJob):
    """Says what to run of a job of servers and trainers.

    Servers keep their checkpoints under the job's name, so no job goes on from another's.

    Attributes:
        trainer: the command of every trainer.
        server: the command of every server.
        trainers: how many trainers; several machines share them out, in order.
        servers: how many servers; likewise.
        server_endpoints: where servers listen, the first `servers` of which are on this machine;
            by `port` unless given.
        trainers_done: what is said when all trainers have ended well.
        checkpoint_dir: where servers keep checkpoints of their own; a temporary folder unless
            given.
        save_dirs: the folders below which servers write and read what trainers save and restore;
            those of `JAXFLEET_SAVE_DIR` unless given, or this process's working directory.
        restarts: how often a server that died is started again.
        server_return_s: how long trainers wait for a server that died, if it is started again.
    """

    trainer: tuple[str, ...]
    server: tuple[str, ...] = (sys.executable, "-m", "jaxfleet", "serve")
    trainers: int = 1
    servers: int = 1
    server_endpoints: tuple[str, ...] = ()
    trainers_done: str = ""
    checkpoint_dir: Path | None = None
    save_dirs: tuple[Path, ...] = ()
    restarts: int = 3
    server_return_s: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("trainers", self.trainers, 1, _MOST_PROCESSES)
        check_range("servers", self.servers, 1, _MOST_PROCESSES)
        check_range("restarts", self.restarts, 0, math.inf)
        check_range("port", self.port, 0, _MOST_PORT - self.servers)
        check_seconds("server_return_s", self.server_return_s)
        if self.server_endpoints and len(self.server_endpoints) < self.servers:
            what = f"{self.servers} servers have {len(self.server_endpoints)} endpoints"
            raise StrategyError(what, hint="list one for each: 10.0.0.1:6174,10.0.0.1:6175")
        if not self.trainer or not self.server:
            hint = "give a program and its arguments, one string each"
            raise StrategyError("a job needs a command for trainers and one for servers", hint=hint)


@dataclass(frozen=True, kw_only=True)
class CollectiveJob(AnyJob):
    """Says what to run of a job of ranks, which have no servers.

    Attributes:
        command: of every rank.
        nproc: how many ranks each machine has.
        gpus: this machine's, by number; its ranks share them out. None for a job that has none, or
            leaves them to jax.
        cpu_devices: how many devices the CPU stands in for in each rank; None leaves that open.
        max_restarts: how often all are started again after one failed.
        proxies: whether ranks may reach others through a proxy.
    """

    command: tuple[str, ...]
    nproc: int = 1
    gpus: tuple[int, ...] | None = None
    cpu_devices: int | None = None
    max_restarts: int = 0
    proxies: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("nproc", self.nproc, 1, _MOST_PROCESSES)
        check_range("max_restarts", self.max_restarts, 0, math.inf)
        check_range("port", self.port, 0, _MOST_PORT - self.nproc)
        if self.cpu_devices is not None:
            check_range("devices per process", self.cpu_devices, 1, math.inf)
        if self.gpus is not None and len(self.gpus) % self.nproc:
            what = f"{len(self.gpus)} GPUs cannot be shared out to {self.nproc} processes"
            hint = "choose --nproc or --gpus so that each has as many; JAX_PLATFORMS=cpu uses none"
            raise StrategyError(what, hint=hint)
        if not self.command:
            hint = "give a program and its arguments, one string each"
            raise StrategyError("a job needs a command", hint=hint)


def check_range(name: str, value: int, least: int, most: float) -> None:
    """Refuses a number that is out of bounds.

    Raises:
        StrategyError: it is.
    """
    if not least <= value <= most:
        bounds = f"{least} or more" if most == math.inf else f"from {least} to {most}"
        raise StrategyError(f"{name} is {value}", hint=f"it is {bounds}")


def check_seconds(name: str, value: float | None) -> None:
    """Refuses what is no time.

    Raises:
        StrategyError: it is none.
    """
    if value is not None and not 0 <= value < math.inf:
        raise StrategyError(f"{name} is {value}", hint="it is a number of seconds")

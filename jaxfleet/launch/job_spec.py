"""Specification of a launch: commands, process counts, machines, and handling of failures."""

import math
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxfleet.env import SaveInterval
from jaxfleet.errors import StrategyError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Nodes:
    """The machines of a job, in the order in which their processes are numbered.

    All machines derive the same values from the same names, without communication.

    Attributes:
        names: addresses or host names by which the machines reach each other.
        own: this machine's.
    """

    names: tuple[str, ...] = (LOOPBACK,)
    own: str = LOOPBACK

    def __post_init__(self) -> None:
        for at, name in enumerate(self.names):
            if not name or any(letter.isspace() or letter == "," for letter in name):
                raise StrategyError(f"{name!r} is not a machine's name", hint="write --nodes a,b,c")
            if name in self.names[:at]:
                hint = "each machine stands once; --nproc gives its number of processes"
                raise StrategyError(f"the machine {name} is named twice", hint=hint)
        if self.own not in self.names:
            known = ", ".join(self.names) or "none"
            hint = "give --node as it stands in --nodes"
            raise StrategyError(
                f"this machine, {self.own}, is none of the job's: {known}", hint=hint
            )

    @property
    def several(self) -> bool:
        return len(self.names) > 1

    @property
    def index(self) -> int:
        return self.names.index(self.own)

    @property
    def job_name(self) -> str:
        """Default name of the job, the same on all machines."""
        return "+".join(self.names)

    def share(self, count: int, node: int) -> range:
        """Returns one machine's share of `count` items; the first machines get one more.

        >>> [list(Nodes(("a", "b"), "a").share(3, node)) for node in range(2)]
        [[0, 1], [2]]
        """
        each, more = divmod(count, len(self.names))
        first = node * each + min(node, more)
        return range(first, first + each + (node < more))

    def endpoints(self, counts: Sequence[int], port: int) -> tuple[str, ...]:
        """Returns `counts[n]` endpoints of each machine n, with ports from `port` on.

        >>> Nodes(("a", "b"), "a").endpoints([2, 1], 6170)
        ('a:6170', 'a:6171', 'b:6170')
        """
        return tuple(
            f"{name}:{port + at}"
            for name, count in zip(self.names, counts, strict=True)
            for at in range(count)
        )


# Exit status of a server that cannot listen because its port is taken; it is started again
# without counting as a failure.
PORT_TAKEN = 98

SERVE = (sys.executable, "-m", "jaxfleet", "serve")

MOST_PROCESSES = 1024
_MOST_PORT = 65536


def _new_name() -> str:
    return f"job-{secrets.token_hex(4)}"


@dataclass(frozen=True, kw_only=True)
class AnyJob:
    """How the processes of a job run on this machine, whatever their roles.

    Attributes:
        name: the job's id, which its processes check among each other; a new one by default, but
            required for a job on several machines.
        nodes: the job's machines.
        port: the first port of its processes, the others follow; 0 picks free ones on one machine,
            and means 6170 on several.
        log_dir: folder for one log file per process.
        secret_file: the secret shared by the job's processes; a new one by default, but required
            for a job on several machines.
        insecure: the job has no secret: every user who reaches its ports can take part in it.
        timeout_s: the longest run time of the job; None for no limit.
        grace_s: how long a process may take to end after a signal.
        threads: compute threads of each process; None for XLA's default.
        quiet: whether the launch itself prints only failures.
        max_restarts: how often the whole job is started again when nothing else helps.
        save_every: interval of the checkpoints that steps write by themselves; None for none.
        save_to: their folder, in which a folder of the job's name holds them; a temporary one by
            default, or `checkpoint_dir` for a job with servers.
        save_keep: how many of them are kept.
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
    max_restarts: int = 0
    save_every: SaveInterval | None = None
    save_to: Path | None = None
    save_keep: int = 3

    def __post_init__(self) -> None:
        if self.threads is not None:
            check_range("threads", self.threads, 1, math.inf)
        check_range("max_restarts", self.max_restarts, 0, math.inf)
        check_range("save_keep", self.save_keep, 1, math.inf)
        if self.save_every is not None and self.nodes.several and self.save_to is None:
            what = "a job on several machines has no folder for its checkpoints"
            raise StrategyError(what, hint="give --save-to DIR, which all of them can access")
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
        """The secret's file, wherever a process of the job runs."""
        return None if self.secret_file is None else self.secret_file.resolve()


@dataclass(frozen=True, kw_only=True)
class Job(AnyJob):
    """A job of servers and trainers.

    Servers keep their checkpoints under the job's name, so no job resumes another's.

    Attributes:
        trainer: the command of every trainer.
        server: the command of every server.
        trainers: the number of trainers; several machines share them out, in order.
        min_trainers: the number of trainers with which the job goes on when others die, which takes
            a script whose strategy has `on_trainer_lost="continue"`; None if a death ends it.
        servers: the number of servers; likewise.
        server_endpoints: where servers listen, the first `servers` of which are on this machine;
            by `port` by default.
        trainers_done: message printed when all trainers have succeeded.
        checkpoint_dir: where servers keep checkpoints of their own; a temporary folder by default.
        save_dirs: the folders below which servers write and read the checkpoints of trainers; by
            default those of `JAXFLEET_SAVE_DIR`, or this process's working directory.
        restarts: how often a server that died is started again.
        server_return_s: how long trainers wait for a server that died, if it is started again.
        trainer_restarts: how often a trainer that died is started again; the other trainers wait
            for it only if the script's strategy has `on_trainer_lost="wait"`.
        spares: the number of spare processes, one of which takes the place of a dead server.
    """

    trainer: tuple[str, ...]
    server: tuple[str, ...] = SERVE
    trainers: int = 1
    min_trainers: int | None = None
    servers: int = 1
    server_endpoints: tuple[str, ...] = ()
    trainers_done: str = ""
    checkpoint_dir: Path | None = None
    save_dirs: tuple[Path, ...] = ()
    restarts: int = 3
    server_return_s: float = 60.0
    trainer_restarts: int = 0
    spares: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("trainers", self.trainers, 1, MOST_PROCESSES)
        if self.min_trainers is not None:
            check_range("min_trainers", self.min_trainers, 1, self.trainers)
            if self.nodes.several:
                what = "a launch does not see how many trainers of other machines are left"
                raise StrategyError(what, hint="give --trainers N, without MIN, on several")
        check_range("servers", self.servers, 1, MOST_PROCESSES)
        check_range("restarts", self.restarts, 0, math.inf)
        check_range("trainer_restarts", self.trainer_restarts, 0, math.inf)
        check_range("spares", self.spares, 0, self.servers)
        if self.max_restarts and self.nodes.several:
            what = "a job with servers on several machines cannot start again as a whole"
            raise StrategyError(what, hint="leave --max-restarts out, or start it from outside")
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
    """A job of ranks, without servers.

    Attributes:
        command: of every rank.
        nproc: the number of ranks on each machine.
        min_nproc: the number that a machine has at least when the job starts again without the
            ranks that were lost; `nproc` by default.
        min_nodes: the number of machines without which the job does not start; all by default.
        gpus: this machine's, by number; its ranks share them out. None for a job without GPUs, or
            for jax's default.
        cpu_devices: the number of CPU devices of each rank; None for jax's default.
        proxies: whether ranks may reach others through a proxy.
    """

    command: tuple[str, ...]
    nproc: int = 1
    min_nproc: int | None = None
    min_nodes: int | None = None
    gpus: tuple[int, ...] | None = None
    cpu_devices: int | None = None
    proxies: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("nproc", self.nproc, 1, MOST_PROCESSES)
        check_range("min_nproc", self.enough_nproc, 1, self.nproc)
        check_range("min_nodes", self.enough_nodes, 1, len(self.nodes.names))
        if self.is_elastic and not self.max_restarts:
            what = "a job that never starts again has the ranks of its first start"
            raise StrategyError(what, hint="give --max-restarts, or no least number of ranks")
        check_range("port", self.port, 0, _MOST_PORT - self.nproc - self.meets)
        if self.cpu_devices is not None:
            check_range("devices per process", self.cpu_devices, 1, math.inf)
        if self.gpus is not None and len(self.gpus) % self.nproc:
            what = f"{len(self.gpus)} GPUs cannot be shared out to {self.nproc} processes"
            hint = "choose --nproc or --gpus so that each has as many; JAX_PLATFORMS=cpu uses none"
            raise StrategyError(what, hint=hint)
        if not self.command:
            hint = "give a program and its arguments, one string each"
            raise StrategyError("a job needs a command", hint=hint)

    @property
    def enough_nproc(self) -> int:
        return self.nproc if self.min_nproc is None else self.min_nproc

    @property
    def enough_nodes(self) -> int:
        return len(self.nodes.names) if self.min_nodes is None else self.min_nodes

    @property
    def is_elastic(self) -> bool:
        """Whether the job may start again with fewer ranks."""
        return self.enough_nproc < self.nproc or self.enough_nodes < len(self.nodes.names)

    @property
    def meets(self) -> bool:
        """Whether launches agree on each start, at `port`; the ports of ranks follow it then."""
        return self.is_elastic and self.nodes.several


def check_range(name: str, value: int, least: int, most: float) -> None:
    """Rejects a number that is out of bounds."""
    if not least <= value <= most:
        bounds = f"{least} or more" if most == math.inf else f"from {least} to {most}"
        raise StrategyError(f"{name} is {value}", hint=f"it is {bounds}")


def check_seconds(name: str, value: float | None) -> None:
    """Rejects an invalid duration."""
    if value is not None and not 0 <= value < math.inf:
        raise StrategyError(f"{name} is {value}", hint="it is a number of seconds")

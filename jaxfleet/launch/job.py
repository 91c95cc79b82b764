"""What a launch is asked to run: the commands, how many of each, and what becomes of failures."""

import math
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path

from jaxfleet.errors import StrategyError

# A server that cannot listen because somebody else does ends with this status, and is started
# again without being counted as dead.
PORT_TAKEN = 98

_MOST_PROCESSES = 1024


def _new_name() -> str:
    return f"job-{secrets.token_hex(4)}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Says what to run on this machine.

    Attributes:
        trainer: the command of every trainer.
        server: the command of every server.
        trainers: how many trainers.
        servers: how many servers.
        name: the job's id, which its processes tell each other; a new one unless given. Servers
            keep their checkpoints under it, so no job goes on from another's.
        port: the first server's port, the others' follow; 0 finds free ones.
        log_dir: where each process's output is written too, each to a file of its own.
        checkpoint_dir: where servers keep checkpoints of their own; a temporary folder unless
            given.
        secret_file: what the processes of the job share and nobody else may read.
        restarts: how often a server that died is started again.
        server_return_s: how long trainers wait for a server that died, if it is started again.
        timeout_s: how long the job may take in all; None is as long as it likes.
        grace_s: how long a process may take to end once it was told to.
        threads: how many threads each process computes with; None leaves that to XLA.
    """

    trainer: tuple[str, ...]
    server: tuple[str, ...] = (sys.executable, "-m", "jaxfleet", "serve")
    trainers: int = 1
    servers: int = 1
    name: str = field(default_factory=_new_name)
    port: int = 0
    log_dir: Path | None = None
    checkpoint_dir: Path | None = None
    secret_file: Path | None = None
    restarts: int = 3
    server_return_s: float = 60.0
    timeout_s: float | None = None
    grace_s: float = 5.0
    threads: int | None = None

    def __post_init__(self) -> None:
        _check_range("trainers", self.trainers, 1, _MOST_PROCESSES)
        _check_range("servers", self.servers, 1, _MOST_PROCESSES)
        _check_range("restarts", self.restarts, 0, math.inf)
        _check_range("port", self.port, 0, 65536 - self.servers)
        if self.threads is not None:
            _check_range("threads", self.threads, 1, math.inf)
        for name in ("server_return_s", "timeout_s", "grace_s"):
            _check_seconds(name, getattr(self, name))
        if not self.trainer or not self.server:
            hint = "give a program and its arguments, one string each"
            raise StrategyError("a job needs a command for trainers and one for servers", hint=hint)
        if self.secret_file is not None and not self.secret_file.is_file():
            hint = "make it first; whoever can read it can take part in the job"
            raise StrategyError(f"there is no secret file {self.secret_file}", hint=hint)


def _check_range(name: str, value: int, least: int, most: float) -> None:
    if not least <= value <= most:
        bounds = f"{least} or more" if most == math.inf else f"from {least} to {most}"
        raise StrategyError(f"{name} is {value}", hint=f"it is {bounds}")


def _check_seconds(name: str, value: float | None) -> None:
    if value is not None and not 0 <= value < math.inf:
        raise StrategyError(f"{name} is {value}", hint="it is a number of seconds")

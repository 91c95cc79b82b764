"""The options of `jaxfleet launch`, by the kind of job that has them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Option:
    """Describes an option.

    Attributes:
        flag: as it is written.
        name: the field of the job that it is.
        help: what `--help` says.
        metavar: what stands for its value there, empty for a flag that has none.
        type: what makes the value of its text.
    """

    flag: str
    name: str
    help: str
    metavar: str = ""
    type: Callable[[str], Any] = str

    def add_to(self, parser: Any) -> None:
        """Adds it to a parser, or to a group of one."""
        if not self.metavar:
            parser.add_argument(self.flag, dest=self.name, action="store_true", help=self.help)
            return
        parser.add_argument(
            self.flag, dest=self.name, metavar=self.metavar, type=self.type, help=self.help
        )


def _folders(text: str) -> tuple[Path, ...]:
    """Returns the folders that a text lists as `PATH` does."""
    return tuple(Path(word) for word in text.split(os.pathsep) if word)


OF_ANY = (
    Option("--job", "name", "the job's id", "ID"),
    Option("--nodes", "nodes", "the job's machines, by name or address, in order", "A,B"),
    Option("--node", "node", "which of them this one is", "A"),
    Option("--port", "port", "of the first process that listens; free ones unless given; "
           "6170 on several machines", "P", int),
    Option("--log-dir", "log_dir", "write every process's output to a file too", "DIR", Path),
    Option("--secret-file", "secret_file", "the secret that the job's processes share; a new one "
           "unless given, which several machines need", "FILE", Path),
    Option("--insecure", "insecure", "no secret: whoever reaches its ports can take part in the "
           "job, and have its servers write files"),
    Option("--timeout", "timeout_s", "stop all after S seconds", "S", float),
    Option("--grace", "grace_s", "processes that are told to end have S seconds to do so (5)",
           "S", float),
    Option("--threads", "threads", "threads that each process computes with", "N", int),
)  # fmt: skip

OF_SERVERS = (
    Option("--servers", "servers", "how many servers in all, 1 unless given", "N", int),
    Option("--trainers", "trainers", "how many trainers in all, 1 unless given", "N", int),
    Option("--checkpoint-dir", "checkpoint_dir", "where servers keep their checkpoints",
           "DIR", Path),
    Option("--save-dir", "save_dirs", "servers write and read what step.save and step.restore name "
           f"below this folder alone ({os.pathsep} between several; the working directory)",
           "DIR", _folders),
    Option("--restarts", "restarts", "how often a dead server is started again (3)", "N", int),
    Option("--server-return", "server_return_s",
           "trainers wait S seconds for a dead server to be back (60)", "S", float),
    Option("--servers-run-script", "servers_run_script",
           "servers run SCRIPT too, as fluid's scripts expect: it reads its role"),
)  # fmt: skip

OF_COLLECTIVE = (
    Option("--nproc", "nproc", "how many ranks each machine has; there are no servers then",
           "N", int),
    Option("--devices-per-process", "cpu_devices",
           "how many devices the CPU stands in for in each rank", "D", int),
    Option("--gpus", "gpus", "the GPUs that ranks share out; all unless given", "0,1"),
    Option("--max-restarts", "max_restarts",
           "how often all ranks are started again after one failed (0)", "N", int),
)  # fmt: skip

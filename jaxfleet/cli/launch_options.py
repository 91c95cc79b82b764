"""The options of `jaxfleet launch`, and how they are read and written."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxfleet.env import SaveInterval
from jaxfleet.errors import StrategyError


@dataclass(frozen=True)
class Option:
    """A command-line option that sets a field of a job.

    `text` writes its value as `type` reads it.
    """

    flag: str
    name: str
    help: str
    metavar: str = ""
    type: Callable[[str], Any] = str
    text: Callable[[Any], str] = str

    def add_to(self, parser: Any) -> None:
        if not self.metavar:
            parser.add_argument(self.flag, dest=self.name, action="store_true", help=self.help)
            return
        parser.add_argument(
            self.flag, dest=self.name, metavar=self.metavar, type=self.type, help=self.help
        )

    def words(self, given: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the option as it was given, if it was."""
        if self.name not in given:
            return ()
        return (self.flag, self.text(given[self.name])) if self.metavar else (self.flag,)


def _interval(text: str) -> SaveInterval:
    try:
        return SaveInterval.parse(text)
    except StrategyError as error:
        raise argparse.ArgumentTypeError(f"{error}; write 300s, 5m, 1h or 100steps") from None


def _numbers(text: str) -> tuple[int | None, int]:
    """Returns the least number of processes, if given, and that at first: `4`, `1:4`."""
    least, colon, most = text.rpartition(":")
    try:
        return int(least) if colon else None, int(most)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: write 4, or 1:4") from None


def _numbers_text(numbers: tuple[int | None, int]) -> str:
    least, most = numbers
    return str(most) if least is None else f"{least}:{most}"


def _folders(text: str) -> tuple[Path, ...]:
    return tuple(Path(word) for word in text.split(os.pathsep) if word)


def _folders_text(folders: Sequence[Path]) -> str:
    return os.pathsep.join(map(str, folders))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


OF_ANY = (
    Option("--job", "name", "the job's id", "ID"),
    Option("--nodes", "nodes", "the job's machines, by name or address, in order; with --on, how "
           "many there are", "A,B"),
    Option("--node", "node", "which of them this one is", "A"),
    Option("--port", "port", "of the first process that listens; free ones unless given; "
           "6170 on several machines", "P", int),
    Option("--log-dir", "log_dir", "write every process's output to a file too", "DIR", Path),
    Option("--secret-file", "secret_file", "the secret that the job's processes share; a new one "
           "unless given, which several machines need", "FILE", Path),
    Option("--insecure", "insecure", "no secret: whoever reaches its ports can take part in the "
           "job, and have its servers write files"),
    Option("--timeout", "timeout_s", "stop all after S seconds", "S", float),
    Option("--grace", "grace_s", "seconds between SIGTERM and SIGKILL when processes are ended (5)",
           "S", float),
    Option("--threads", "threads", "threads that each process computes with", "N", int),
    Option("--max-restarts", "max_restarts", "how often the whole job is started again after a "
           "failure that nothing else mends (0)", "N", int),
    Option("--save-every", "save_every", "let steps write a checkpoint of the whole job that "
           "often, such as 5m, 300s or 100steps; step.resume(state) goes on from the last", "T",
           _interval),
    Option("--save-to", "save_to", "where, in a folder of the job's name; by default in the "
           "servers' --checkpoint-dir, or where the launch removes them at its end", "DIR", Path),
    Option("--save-keep", "save_keep", "how many of them to keep (3)", "N", int),
)  # fmt: skip

OF_SERVERS = (
    Option("--servers", "servers", "how many servers in all, 1 unless given", "N", int),
    Option("--trainers", "trainers", "how many trainers in all, 1 unless given; MIN:N lets the job "
           "go on without those that die, if strategy.on_trainer_lost is 'continue'", "N",
           _numbers, _numbers_text),
    Option("--checkpoint-dir", "checkpoint_dir", "where servers keep their checkpoints",
           "DIR", Path),
    Option("--save-dir", "save_dirs", "servers write and read what step.save and step.restore name "
           f"below this folder alone ({os.pathsep} between several; the working directory)",
           "DIR", _folders, _folders_text),
    Option("--restarts", "restarts", "how often a dead server is started again (3)", "N", int),
    Option("--trainer-restarts", "trainer_restarts", "how often a dead trainer is started again "
           "(0); the others wait for it if strategy.on_trainer_lost is 'wait'", "N", int),
    Option("--spares", "spares", "processes that wait to take a dead server's place (1)",
           "N", int),
    Option("--server-return", "server_return_s",
           "trainers wait S seconds for a dead server to be back (60)", "S", float),
    Option("--servers-run-script", "servers_run_script",
           "servers run SCRIPT too, as fluid's scripts expect: it reads its role"),
)  # fmt: skip

OF_COLLECTIVE = (
    Option("--nproc", "nproc", "how many ranks each machine has, and no servers; MIN:MAX lets it "
           "start again with fewer, without those that were lost", "N", _numbers, _numbers_text),
    Option("--min-nodes", "min_nodes", "how many of --nodes are enough for a start; all unless "
           "given", "N", int),
    Option("--devices-per-process", "cpu_devices",
           "how many devices the CPU stands in for in each rank", "D", int),
    Option("--gpus", "gpus", "the GPUs that ranks share out; all unless given", "0,1"),
)  # fmt: skip

OF_CLUSTERS = (
    Option("--on", "engine", "let a scheduler start the job: slurm", "ENGINE"),
    Option("--dry-run", "dry_run", "print what the scheduler would be given"),
    Option("--cpus-per-trainer", "cpus_per_trainer", "processors of each trainer or rank (1)",
           "N", int),
    Option("--cpus-per-server", "cpus_per_server", "processors of each server (1)", "N", int),
    Option("--gpus-per-trainer", "gpus_per_trainer", "GPUs of each trainer or rank (0)", "N", int),
    Option("--sbatch", "sbatch", "more options of SLURM's sbatch, such as "
           "time=1:00:00,partition=cpu", "A=B,...", _words),
)  # fmt: skip

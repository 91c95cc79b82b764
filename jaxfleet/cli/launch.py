"""`jaxfleet launch`: runs a script as the trainers of a job with servers, or as its ranks."""

import argparse
import importlib.machinery
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxfleet.env import SaveInterval, read_job
from jaxfleet.errors import ProgramError, StrategyError
from jaxfleet.launch import CollectiveJob, Job, Nodes, launch, launch_ranks
from jaxfleet.launch.placement import seen_gpus, selected_gpus


@dataclass(frozen=True)
class Option:
    """A command-line option that sets a field of a job."""

    flag: str
    name: str
    help: str
    metavar: str = ""
    type: Callable[[str], Any] = str

    def add_to(self, parser: Any) -> None:
        if not self.metavar:
            parser.add_argument(self.flag, dest=self.name, action="store_true", help=self.help)
            return
        parser.add_argument(
            self.flag, dest=self.name, metavar=self.metavar, type=self.type, help=self.help
        )


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


def _folders(text: str) -> tuple[Path, ...]:
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
           _numbers),
    Option("--checkpoint-dir", "checkpoint_dir", "where servers keep their checkpoints",
           "DIR", Path),
    Option("--save-dir", "save_dirs", "servers write and read what step.save and step.restore name "
           f"below this folder alone ({os.pathsep} between several; the working directory)",
           "DIR", _folders),
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
           "start again with fewer, without those that were lost", "N", _numbers),
    Option("--min-nodes", "min_nodes", "how many of --nodes are enough for a start; all unless "
           "given", "N", int),
    Option("--devices-per-process", "cpu_devices",
           "how many devices the CPU stands in for in each rank", "D", int),
    Option("--gpus", "gpus", "the GPUs that ranks share out; all unless given", "0,1"),
)  # fmt: skip

_USAGE = "jaxfleet launch [OPTIONS] (SCRIPT | -m MODULE) [ARGS...]"
_ABOUT = """\
Starts the processes of a job on this machine, shows what they write, and stops all of them when
one fails: parameter servers and trainers, or, with --nproc, ranks of a collective job. A job on
several machines is launched on each. Options stand before the script; what follows it is the
script's own.
"""


def add_parser(commands: Any, about: str) -> None:
    """Adds the command and its arguments; `about` is its line in the list of commands."""
    parser = commands.add_parser(
        "launch",
        help=about,
        usage=_USAGE,
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # the job's defaults apply
    )
    for title, options in (
        ("of any job", OF_ANY),
        ("with servers", OF_SERVERS),
        ("collective", OF_COLLECTIVE),
    ):
        group = parser.add_argument_group(title)
        for option in options:
            option.add_to(group)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument(
        "--compat", action="store_true", help="SCRIPT imports paddle: run it with jaxfleet.fluid"
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    given = vars(args)
    under = ("-m", "jaxfleet.compat") if given.get("compat", False) else ()
    command = _command(args.script, args.args, module=given.get("module", False), under=under)
    if "nproc" in given:
        _refuse(given, OF_SERVERS, "a collective job has no servers; leave --nproc out for some")
        status = launch_ranks(_collective_job(command, given))
    else:
        _refuse(given, OF_COLLECTIVE, "it is of collective jobs: give --nproc too")
        status = launch(_job(command, given))
    if status == 128 + signal.SIGPIPE:  # nothing reads stdout, so drop the rest of its buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _refuse(given: Mapping[str, Any], options: Sequence[Option], hint: str) -> None:
    """Rejects options of the other kind of job."""
    for option in options:
        if option.name in given:
            raise StrategyError(f"{option.flag} does nothing here", hint=hint)


def _job(command: tuple[str, ...], given: Mapping[str, Any]) -> Job:
    options = _picked(given, (*OF_ANY, *OF_SERVERS))
    if "nodes" in options and "name" not in options:
        hint = "give --job: all machines have to say the same, and no other job may"
        raise StrategyError("a job on several machines has no name", hint=hint)
    if "trainers" in options:
        options["min_trainers"], options["trainers"] = options["trainers"]
    if options.pop("servers_run_script", False):
        options["server"] = command
    return Job(trainer=command, **options)


def _collective_job(command: tuple[str, ...], given: Mapping[str, Any]) -> CollectiveJob:
    options = _picked(given, (*OF_ANY, *OF_COLLECTIVE))
    if "nodes" in options and "name" not in options:
        options["name"] = options["nodes"].job_name
    options["min_nproc"], options["nproc"] = options["nproc"]
    gpus = options.pop("gpus", None)
    if gpus is not None:
        options["gpus"] = selected_gpus(gpus)
    elif "cpu_devices" not in options:
        options["gpus"] = seen_gpus() or None
    return CollectiveJob(command=command, **options)


def _picked(given: Mapping[str, Any], options: Sequence[Option]) -> dict[str, Any]:
    """Returns the given options as fields of a job, machines as one field."""
    picked = {option.name: given[option.name] for option in options if option.name in given}
    if "secret_file" not in picked and "insecure" not in picked:
        picked["secret_file"] = read_job().secret_file
    names, own = picked.pop("nodes", None), picked.pop("node", None)
    if names is None and own is None:
        return picked
    listed = tuple(word.strip() for word in (names or own).split(","))
    if own is None and len(listed) > 1:
        hint = "give --node, as it stands in --nodes"
        raise StrategyError("which of several machines is this one?", hint=hint)
    return picked | {"nodes": Nodes(listed, own or listed[0])}


def _command(
    script: str, args: Sequence[str], *, module: bool, under: tuple[str, ...]
) -> tuple[str, ...]:
    if not module:
        if not Path(script).exists():
            hint = "options of the launch stand before the script, its own after it"
            raise ProgramError(f"there is no script {script}", hint=hint)
        return (sys.executable, *under, script, *args)
    if not _finds_module(script):
        hint = "a module is found in this folder, on PYTHONPATH, or where it is installed"
        raise ProgramError(f"there is no module {script}", hint=hint)
    return (sys.executable, *under, "-m", script, *args)


def _finds_module(name: str) -> bool:
    """Whether the module's package can be found, without importing anything."""
    top = name.partition(".")[0]
    if not top:
        return False
    here = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd())])
    return here is not None or importlib.util.find_spec(top) is not None

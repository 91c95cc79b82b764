"""`jaxfleet launch`: runs a script as the trainers of a job, with its parameter servers."""

import argparse
import importlib.machinery
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxfleet.errors import ProgramError
from jaxfleet.launch import Job, launch

_USAGE = "jaxfleet launch [OPTIONS] (SCRIPT | -m MODULE) [ARGS...]"
_ABOUT = """\
Starts parameter servers and trainers on this machine, shows what they write, and stops all of
them when one fails. Options stand before the script; what follows it is the script's own.
"""


def add_parser(commands: Any) -> None:
    """Adds the command and its arguments."""
    parser = commands.add_parser(
        "launch",
        help="run a script as trainers with parameter servers, on this machine",
        usage=_USAGE,
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # what is not given is as `Job` has it
    )
    _add_options(parser)
    parser.add_argument(
        "--servers-run-script",
        action="store_true",
        help="servers run SCRIPT too, as fluid's scripts expect: it reads its role",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--servers", type=int, metavar="N", help="how many servers, 1 unless given")
    add("--trainers", type=int, metavar="N", help="how many trainers, 1 unless given")
    add("--job", dest="name", metavar="ID", help="the job's id")
    add("--log-dir", type=Path, metavar="DIR", help="write every process's output to a file too")
    add("--checkpoint-dir", type=Path, metavar="DIR", help="where servers keep their checkpoints")
    add("--restarts", type=int, metavar="N", help="how often a dead server is started again (3)")
    add(
        "--server-return",
        dest="server_return_s",
        type=float,
        metavar="S",
        help="trainers wait S seconds for a dead server to be back (60)",
    )
    add("--secret-file", type=Path, metavar="FILE", help="a secret that the job's processes share")
    add("--port", type=int, metavar="P", help="of the first server; free ports unless given")
    add("--timeout", dest="timeout_s", type=float, metavar="S", help="stop all after S seconds")
    add(
        "--grace",
        dest="grace_s",
        type=float,
        metavar="S",
        help="processes that are told to end have S seconds to do so (5)",
    )
    add("--threads", type=int, metavar="N", help="threads that each process computes with")


_OF_JOB = (
    *("servers", "trainers", "name", "log_dir", "checkpoint_dir", "restarts", "server_return_s"),
    *("secret_file", "port", "timeout_s", "grace_s", "threads"),
)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    given = vars(args)
    options = {name: given[name] for name in _OF_JOB if name in given}
    trainer = _trainer(args.script, args.args, module=given.get("module", False))
    if given.get("servers_run_script", False):
        options["server"] = trainer
    status = launch(Job(trainer=trainer, **options))
    if status == 128 + signal.SIGPIPE:  # nobody reads stdout, so what is left in it cannot be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _trainer(script: str, args: Sequence[str], *, module: bool) -> tuple[str, ...]:
    """Returns a trainer's command.

    Raises:
        ProgramError: there is no such script or module.
    """
    if not module:
        if not Path(script).exists():
            hint = "options of the launch stand before the script, its own after it"
            raise ProgramError(f"there is no script {script}", hint=hint)
        return (sys.executable, script, *args)
    if not _finds_module(script):
        hint = "a module is found in this folder, on PYTHONPATH, or where it is installed"
        raise ProgramError(f"there is no module {script}", hint=hint)
    return (sys.executable, "-m", script, *args)


def _finds_module(name: str) -> bool:
    """Returns whether the module's package can be found, without importing anything."""
    top = name.partition(".")[0]
    if not top:
        return False
    here = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd())])
    return here is not None or importlib.util.find_spec(top) is not None

"""`jaxfleet launch`: runs a script as the trainers of a job with servers, or as its ranks."""

import argparse
import importlib.machinery
import importlib.util
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from jaxfleet.cli.launch_options import OF_ANY, OF_CLUSTERS, OF_COLLECTIVE, OF_SERVERS, Option
from jaxfleet.env import read_job
from jaxfleet.errors import ProgramError, StrategyError
from jaxfleet.launch import CollectiveJob, Job, Nodes, launch, launch_ranks
from jaxfleet.launch.engines import Batch, Request, Resources, any_machines, batch_script, submit
from jaxfleet.launch.placement import seen_gpus, selected_gpus

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
        ("on a cluster", OF_CLUSTERS),
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
    else:
        _refuse(given, OF_COLLECTIVE, "it is of collective jobs: give --nproc too")
    if "engine" in given:
        return _on_cluster(command, given)
    _refuse(given, OF_CLUSTERS, "it is of jobs on a cluster: give --on slurm too")
    if "nproc" in given:
        status = launch_ranks(_collective_job(command, given))
    else:
        status = launch(_job(command, given))
    if status == 128 + signal.SIGPIPE:  # nothing reads stdout, so drop the rest of its buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _refuse(given: Mapping[str, Any], options: Sequence[Option], hint: str) -> None:
    """Rejects options of the other kind of job."""
    for option in options:
        if option.name in given:
            raise StrategyError(f"{option.flag} does nothing here", hint=hint)


_PLACES = ("node", "port")  # which the scheduler chooses
_OF_BATCH = ("nodes", "name", "secret_file", "insecure")  # of which the batch script takes care


def _on_cluster(command: tuple[str, ...], given: Mapping[str, Any]) -> int:
    """Submits the job to a scheduler, or prints what it would be given; returns the exit status."""
    if given["engine"] != "slurm":
        what = f"there is no engine {given['engine']!r}"
        raise StrategyError(what, hint="write --on slurm")
    places = [option for option in OF_ANY if option.name in _PLACES]
    _refuse(given, places, "the scheduler chooses machines and ports")
    name = given.get("name", Path(given["script"]).stem)
    script = batch_script(_request(command, given), Batch(name, given.get("sbatch", ())))
    if given.get("dry_run", False):
        print(script, end="")
        return 0
    job = submit(script)
    print(f"SLURM has job {job}; its output goes to {name}-{job}.log, and scancel {job} ends it")
    return 0


def _request(command: tuple[str, ...], given: Mapping[str, Any]) -> Request:
    """Returns what the scheduler is asked for; the job is checked here, and again by launches."""
    machines = given.get("nodes", "1")
    if not machines.isdecimal():
        hint = "with --on it is how many machines the job gets"
        raise StrategyError(f"--nodes is {machines!r}", hint=hint)
    insecure, secret_file = given.get("insecure", False), given.get("secret_file")
    checked = {name: value for name, value in given.items() if name not in _OF_BATCH}
    names = any_machines(int(machines)).names
    checked |= {"name": "checked", "nodes": ",".join(names), "node": names[0], "insecure": True}
    options = [*OF_ANY, *OF_SERVERS, *OF_COLLECTIVE]
    words = [word for option in options if option.name not in _OF_BATCH
             for word in option.words(given)]  # fmt: skip
    words += [flag for flag, name in (("--compat", "compat"), ("-m", "module")) if given.get(name)]
    asked = {each.name: given[each.name] for each in fields(Resources) if each.name in given}
    return Request(
        _collective_job(command, checked) if "nproc" in given else _job(command, checked),
        (*words, given["script"], *given["args"]),
        Resources(**asked),
        secret_file=None if insecure else secret_file or read_job().secret_file,
        insecure=insecure,
    )


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

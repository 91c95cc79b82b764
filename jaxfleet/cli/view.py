"""`jaxfleet view`: a report of a script, a dump folder or a program, as one HTML file."""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxfleet.cli.app import log
from jaxfleet.cli.files import STDIN, read_programs, shown
from jaxfleet.cli.scripts import run_script, split_arguments
from jaxfleet.env import dumping_to
from jaxfleet.errors import ProgramError
from jaxfleet.ir import Program
from jaxfleet.ir.source_excerpts import excerpts
from jaxfleet.pipeline import dump_folders
from jaxfleet.report import History, build_report, of_program, read_folders, write_report

_USAGE = """\
jaxfleet view [-o FILE] [--run-all] [--measure N] SCRIPT [ARGS...]
       jaxfleet view [-o FILE] FOLDER
       jaxfleet view [-o FILE] PROGRAM.txt\
"""
_ABOUT = """\
Writes a report of what the compiler did: its decisions, every pass with the program before and
after, every operator with the line it comes from, the way of each parameter, memory and traffic.
The report is one file, which a browser opens without a network.
A script runs until its first training step unless --run-all is given, and this command's own
options stand before it. A folder is what `jaxfleet dump` or `dump_dir` wrote.
"""
_EXAMPLES = """\
examples:
  jaxfleet view train.py --epochs 2
  jaxfleet view --measure 10 train.py
  jaxfleet view -o report.html dumps
  jaxfleet view step.txt
"""

_NOT_ASKED = "jaxfleet view --measure 10 SCRIPT times ten steps, and the rates of the devices."
_UNMEASURED = (
    "It was not timed: the script did not run it, or other processes would have had to, or it is "
    "a server's, whose blocks a trainer's report has."
)


def add_parser(commands: Any, about: str) -> None:
    """Adds the command and its arguments; `about` is its line in the list of commands."""
    parser = commands.add_parser(
        "view",
        help=about,
        usage=_USAGE,
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-o", "--output", metavar="FILE", help="NAME.html here unless given, by the target's name")
    add("--run-all", action="store_true", help="run a script to its end")
    add(
        "--measure", metavar="N", type=_calls, default=0, help="time N steps of a script; default 0"
    )
    add("target", metavar="TARGET", help="a Python file, a folder of dumps, or a program; - is one")
    add("args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's arguments")
    parser.set_defaults(run=run)


def _calls(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


_calls.__name__ = "number of steps"  # as argparse names it in its messages


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    target, status = Path(args.target), 0
    if args.args and target.suffix != ".py":
        what = f"{args.target} is not a script and takes no arguments: {' '.join(args.args)}"
        raise ProgramError(what, hint="options stand before the target: jaxfleet view -o FILE ...")
    if args.measure and target.suffix != ".py":
        what = f"--measure {args.measure}: {args.target} is not a script, so there are no steps"
        raise ProgramError(what, hint="jaxfleet view --measure N SCRIPT, or step.view(measure=N)")
    output = Path(args.output or f"{_stem(args.target)}.html")
    _refuse_unwritable(output)  # before a script has run for long
    if target.is_dir():
        histories = read_folders(target)
    elif target.suffix == ".py":
        status, histories = _of_script(
            args.target, args.args, run_all=args.run_all, measure=args.measure
        )
    else:
        histories = [_of_text(program, shown(args.target)) for program in _read(args.target)]
    if not histories:
        log(f"no pipeline ran in {args.target}, so there is nothing to report")
        return status
    _write(histories, output)
    if status:
        log(f"{args.target} ended with status {status}: the report has what ran before")
    return status


def _refuse_unwritable(path: Path) -> None:
    if path.is_dir():
        what, hint = f"cannot write {path}: it is a folder", f"-o {path / 'report.html'}"
        raise ProgramError(what, hint=hint)
    if path.exists() and not path.is_file():  # a pipe, or /dev/stdout
        return
    folder = path.resolve().parent
    if not folder.is_dir():
        what = f"cannot write {path}: there is no folder {folder}"
        raise ProgramError(what, hint=f"make it, for example with mkdir -p {folder}")
    if not os.access(folder, os.W_OK):
        what = f"cannot write {path}: the folder {folder} is not writable"
        raise ProgramError(what, hint="-o FILE names another file")


def _read(name: str) -> Sequence[Any]:
    if name != STDIN and not Path(name).exists():
        raise ProgramError(f"there is no {name}", hint="give a script, a folder or a program")
    return read_programs(name)


def _of_text(program: Program, label: str) -> History:
    """Returns the history of a program's text, with the lines of files of the current folder."""
    sources = excerpts(program, Path.cwd())
    if not sources:
        return of_program(program, label)
    said = f"of {', '.join(sorted(sources))} in the current folder, as they are now"
    return replace(of_program(program, label), sources=sources, facts=[("your lines", said)])


def _of_script(
    script: str, args: Sequence[str], *, run_all: bool, measure: int
) -> tuple[int, list[History]]:
    if not Path(script).is_file():
        raise ProgramError(f"there is no script {script}")
    words, rest = split_arguments(args)
    with tempfile.TemporaryDirectory(prefix="jaxfleet-view-") as folder:
        with dumping_to(Path(folder), until_compiled=not run_all, measure=measure):
            status = run_script(script, [*words, *rest])
        found = read_folders(folder) if dump_folders(folder) else []
    why = _UNMEASURED if measure else _NOT_ASKED
    return status, [replace(history, why_unmeasured=why) for history in found]


def _stem(target: str) -> str:
    return "program" if target == STDIN else Path(target).resolve().stem


def _write(histories: Sequence[History], path: Path) -> None:
    size = write_report(build_report(histories), path)
    operators = sum(history.last.op_count for history in histories)
    count = f"{len(histories)} program{'s' * (len(histories) != 1)}"
    say = print if path.is_file() else log  # the report itself may go to standard output
    say(f"{path}: {count}, {operators} operators, {size / 1e6:.2f} MB")

"""`jaxfleet dump`: runs a script and shows the effect of every pass of every pipeline in it."""

import argparse
from pathlib import Path
from typing import Any

from jaxfleet.cli.app import log
from jaxfleet.cli.scripts import run_script, split_arguments
from jaxfleet.env import dumping_to
from jaxfleet.errors import ProgramError
from jaxfleet.pipeline import dump_folders, read_index, remove_dumps

_USAGE = """\
jaxfleet dump [--dump-dir DIR] [--source] [--until-compiled] SCRIPT [ARGS...]
       jaxfleet dump [--dump-dir DIR] [--source] [--until-compiled] SCRIPT -- [ARGS...]\
"""
_ABOUT = """\
Runs a script as `python SCRIPT ARGS` would, and writes what the passes did to each program.
This command's own options may also stand behind the script; all behind a `--` is the script's.
"""
_EXAMPLES = """\
examples:
  jaxfleet dump --dump-dir dumps train.py --epochs 2
  jaxfleet dump --dump-dir dumps train.py -- --source of-the-script
"""


def add_parser(commands: Any, about: str) -> None:
    """Adds the command and its arguments; `about` is its line in the list of commands."""
    own = _own_arguments()
    parser = commands.add_parser(
        "dump",
        help=about,
        usage=_USAGE,
        description=_ABOUT,
        epilog=_EXAMPLES,
        parents=[own],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument(
        "args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's arguments"
    )
    parser.set_defaults(run=run)


def _own_arguments() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    own.add_argument("--dump-dir", metavar="DIR", help="where to write, ./dump unless given")
    own.add_argument(
        "--until-compiled",
        action="store_true",
        help="end the script at its first training step, once all of its passes have run",
    )
    own.add_argument("--source", action="store_true", help="source lines in the diffs too")
    return own


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    words, rest = split_arguments(args.args)
    args, script_args = _own_arguments().parse_known_args(words, namespace=args)
    folder = Path(getattr(args, "dump_dir", "dump"))
    if not Path(args.script).is_file():
        raise ProgramError(f"there is no script {args.script}")
    remove_dumps(folder)
    only = getattr(args, "until_compiled", False)
    with dumping_to(folder, source=getattr(args, "source", False), until_compiled=only):
        status = run_script(args.script, [*script_args, *rest])
    _show(folder)
    return status


def _show(folder: Path) -> None:
    found = dump_folders(folder)
    if not found:
        log(f"no pipeline ran in the script, so {folder} has no dump")
    for each in found:
        print(f"{each}:\n{read_index(each)}")

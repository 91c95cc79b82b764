"""`jaxfleet dump`: runs a script and shows the effect of every pass of every pipeline in it."""

import argparse
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxfleet.cli.app import SCRIPT_FAILED, log
from jaxfleet.env import dumping_to
from jaxfleet.errors import JaxfleetError, ProgramError
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
    words, rest = _split(args.args)
    args, script_args = _own_arguments().parse_known_args(words, namespace=args)
    folder = Path(getattr(args, "dump_dir", "dump"))
    if not Path(args.script).is_file():
        raise ProgramError(f"there is no script {args.script}")
    remove_dumps(folder)
    only = getattr(args, "until_compiled", False)
    with dumping_to(folder, source=getattr(args, "source", False), until_compiled=only):
        status = _run_script(args.script, [*script_args, *rest])
    _show(folder)
    return status


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def _run_script(script: str, args: Sequence[str]) -> int:
    with _as_main(script, args):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            return _status(ended.code)
        except JaxfleetError as error:
            log("".join(traceback.format_exception_only(error)).rstrip())
            return SCRIPT_FAILED
        except Exception as error:  # noqa: BLE001  # whatever the script raises is its own
            _log_from_script(error, script)
            return SCRIPT_FAILED
    return 0


@contextmanager
def _as_main(script: str, args: Sequence[str]) -> Iterator[None]:
    """Sets the arguments and the import path as `python SCRIPT` would."""
    argv, path = sys.argv, sys.path
    sys.argv = [script, *args]
    sys.path = [str(Path(script).resolve().parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


def _status(code: object) -> int:
    """Returns the exit status of `sys.exit(code)`, by Python's rules."""
    if code is None or isinstance(code, int):
        return int(code or 0)
    log(str(code))
    return 1


def _log_from_script(error: Exception, script: str) -> None:
    """Prints a traceback as Python would, without the frames that run the script."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    log("".join(traceback.format_exception(error.with_traceback(frames))).rstrip())


def _show(folder: Path) -> None:
    found = dump_folders(folder)
    if not found:
        log(f"no pipeline ran in the script, so {folder} has no dump")
    for each in found:
        print(f"{each}:\n{read_index(each)}")

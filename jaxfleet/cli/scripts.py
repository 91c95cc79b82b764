"""Runs a user's script in this process, for commands that watch what it does."""

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxfleet.cli.app import SCRIPT_FAILED, log
from jaxfleet.errors import JaxfleetError


def split_arguments(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words before a `--`, and those behind it."""
    at = words.index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def run_script(script: str, args: Sequence[str]) -> int:
    """Runs a script as `python SCRIPT ARGS` would; returns its exit status."""
    file = str(Path(script).absolute())  # as `python SCRIPT` names it, so that its lines are found
    with _as_main(script, args):
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as ended:
            return _status(ended.code)
        except JaxfleetError as error:
            log("".join(traceback.format_exception_only(error)).rstrip())
            return SCRIPT_FAILED
        except Exception as error:  # noqa: BLE001  # whatever the script raises is its own
            _log_from_script(error, file)
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

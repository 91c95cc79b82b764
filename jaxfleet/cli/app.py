"""The `jaxfleet` command: finds the sub-command, and prints errors with their notes.

Data goes to stdout, everything said about it to stderr. The exit status is 0 when all went well,
1 when `diff` found a difference or a script failed, and 2 when an argument, a file or a program
is wrong. `launch` ends as the first process of its job that failed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

import jaxfleet
from jaxfleet.cli import diff, dump, launch, opt, passes, plan, serve, timeline, top
from jaxfleet.cli.output import USER_ERROR, log
from jaxfleet.errors import JaxfleetError

_COMMANDS = (opt, diff, passes, dump, plan, launch, serve, top, timeline)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    Args:
        argv: the words after `jaxfleet`; those of this process unless given.
    """
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # who read the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (JaxfleetError, OSError) as error:
        log(f"error: {error}")
        for note in getattr(error, "__notes__", ()):
            log(note)
        return USER_ERROR
    except RecursionError:
        log("error: the program is nested too deep: blocks in blocks, or calls in calls")
        return USER_ERROR
    return status


def _version() -> str:
    """What a bug report needs: versions of jaxfleet, JAX and Python."""
    python = ".".join(map(str, sys.version_info[:3]))
    return f"jaxfleet {jaxfleet.__version__} (jax {version('jax')}, Python {python})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxfleet", description="Compiles one-device JAX training programs; reads programs."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser

"""The `jaxfleet` command: finds the sub-command, and prints errors with their notes.

Data goes to stdout, everything said about it to stderr. The exit status is 0 when all went well,
1 when `diff` found a difference or a script failed, and 2 when an argument, a file or a program
is wrong. `launch` ends as the first process of its job that failed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

import jaxfleet
from jaxfleet.cli.output import USER_ERROR, log
from jaxfleet.errors import JaxfleetError

_COMMANDS = {  # each is a module beside this one
    "opt": "run passes on the text of programs",
    "diff": "show what is different between two programs",
    "passes": "list the passes with their options",
    "dump": "run a script and write what every pass in it did",
    "plan": "show what parameter servers would hold and what would travel",
    "launch": "run a script as trainers with parameter servers, or as ranks of a collective job",
    "serve": "run one parameter server; its role is read from the environment",
    "top": "show what the servers and trainers of a running job do",
    "timeline": "merge what the processes of a job noted into one timeline",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    Args:
        argv: the words after `jaxfleet`; those of this process unless given.
    """
    words = sys.argv[1:] if argv is None else argv
    args = _parser(words).parse_args(words)
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


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Makes the parser of some words; of all commands it imports the one that they name.

    A command imports what it works with, which for most takes longer than all that `launch` does.
    """
    parser = argparse.ArgumentParser(
        prog="jaxfleet", description="Compiles one-device JAX training programs; reads programs."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    named = next((word for word in words if not word.startswith("-")), None)
    for name, about in _COMMANDS.items():
        if name == named:
            import_module(f"jaxfleet.cli.{name}").add_parser(commands, about)
        else:
            commands.add_parser(name, help=about)
    return parser

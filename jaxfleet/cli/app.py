"""The `jaxfleet` command: runs the sub-command, and prints errors with their notes.

Data goes to stdout, messages to stderr. The exit status is 0 on success, 1 when `diff` found a
difference or a script failed, and 2 when an argument, a file or a program is wrong. `launch`
returns the status of the first process of its job that failed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

import jaxfleet
from jaxfleet.errors import JaxfleetError

COMMANDS = {  # each is a module in this package
    "opt": "run passes on the text of programs",
    "diff": "show what is different between two programs",
    "passes": "list the passes with their options",
    "dump": "run a script and write what every pass in it did",
    "view": "write a report of a script, a dump or a program: one HTML file",
    "plan": "show what parameter servers would hold and what would travel",
    "launch": "run a script as trainers with parameter servers, or as ranks of a collective job",
    "scale": "change the number of trainers or servers of a running job",
    "serve": "run one parameter server; its role is read from the environment",
    "top": "show what the servers and trainers of a running job do",
    "timeline": "merge what the processes of a job noted into one timeline",
}
DIFFERENT = 1
SCRIPT_FAILED = 1
USER_ERROR = 2
_OWN = frozenset({"-h", "--help", "--version"})  # options before the command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    words = sys.argv[1:] if argv is None else argv
    parser = make_parser(words)
    if words and words[0].startswith("-") and words[0] not in _OWN:
        option = words[0].partition("=")[0]
        parser.error(f"{option} is not an option of jaxfleet itself: write it behind the command")
    args = parser.parse_args(words)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
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


def log(text: str) -> None:
    """Prints a message to stderr, apart from the data."""
    print(text, file=sys.stderr)


def _version() -> str:
    """Returns the versions for a bug report: jaxfleet, JAX and Python."""
    python = ".".join(map(str, sys.version_info[:3]))
    return f"jaxfleet {jaxfleet.__version__} (jax {version('jax')}, Python {python})"


def make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Builds the parser; imports only the command that the arguments name.

    A command imports its dependencies, which for most takes longer than a whole run of `launch`.
    """
    parser = argparse.ArgumentParser(
        prog="jaxfleet", description="Compiles one-device JAX training programs; reads programs."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    named = next((word for word in words if not word.startswith("-")), None)
    for name, about in COMMANDS.items():
        if name == named:
            import_module(f"jaxfleet.cli.{name}").add_parser(commands, about)
        else:
            commands.add_parser(name, help=about)
    return parser

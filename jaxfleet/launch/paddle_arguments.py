"""What paddle's two launch commands have in common: arguments, and how they are read and shown."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxfleet.errors import JaxfleetError, ProgramError

_FALSE = frozenset({"", "0", "false", "no", "off", "none"})
_USER_ERROR = 2


def add_common(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that both commands have, the script last."""
    add: Any = parser.add_argument
    add("--cluster_node_ips", default="127.0.0.1", metavar="A,B", help="all machines")
    add("--node_ip", default="127.0.0.1", metavar="A", help="this machine")
    add("--print_config", type=_truth, default=True, metavar="BOOL", help="print the arguments")
    add("training_script", metavar="SCRIPT", help="a Python file")
    add("training_script_args", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")


def _truth(word: str) -> bool:
    """Reads a word as what its writer meant: to the original, `False` was true."""
    return word.strip().lower() not in _FALSE


def tell(args: argparse.Namespace) -> None:
    """Prints the arguments."""
    lines = [f"{name}: {value}" for name, value in sorted(vars(args).items())]
    width = max(map(len, lines))
    rule = "-" * width
    title = " arguments ".center(width, "-")
    sys.stdout.write("\n".join([title, *lines, rule]) + "\n")
    sys.stdout.flush()


def script_command(args: argparse.Namespace, runner: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Returns the command that runs the script.

    Args:
        args: the launch's.
        runner: what Python is given before the script.

    Raises:
        ProgramError: there is no such script.
    """
    if not Path(args.training_script).exists():
        hint = "arguments of the launch stand before the script, its own after it"
        raise ProgramError(f"there is no script {args.training_script}", hint=hint)
    return (sys.executable, "-u", *runner, args.training_script, *args.training_script_args)


def run_as_command(
    launch: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None
) -> int:
    """Calls a launch; prints an error with its notes and returns 2 where there was one."""
    try:
        return launch(argv)
    except (JaxfleetError, OSError) as error:
        lines = [f"error: {error}", *getattr(error, "__notes__", ())]
        sys.stderr.write("\n".join(lines) + "\n")
        return _USER_ERROR

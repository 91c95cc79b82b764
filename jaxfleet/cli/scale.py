"""`jaxfleet scale`: changes how many trainers and servers a job of `jaxfleet launch` has."""

import argparse
from typing import Any

from jaxfleet.errors import StrategyError
from jaxfleet.launch.control import running_launch
from jaxfleet.launch.job_spec import MOST_PROCESSES, check_range


def add_parser(commands: Any, about: str) -> None:
    """Adds the command and its arguments; `about` is its line in the list of commands."""
    parser = commands.add_parser(
        "scale",
        help=about,
        description="Has the jaxfleet launch of this user on this machine start more trainers, "
        "which join the job at a step, or lets those with the highest numbers leave at one; and "
        "has the job go on with more servers, or without the last ones. Nothing is changed unless "
        "the job allows it.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--trainers", type=int, metavar="N", help="how many trainers it is to have")
    add("--servers", type=int, metavar="N", help="how many servers it is to have")
    add("--job", metavar="ID", help="the job's id, if several run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    numbers = {"trainers": args.trainers, "servers": args.servers}
    if set(numbers.values()) == {None}:
        what = "jaxfleet scale was given no number"
        raise StrategyError(what, hint="--trainers N, --servers N, or both")
    for name, number in numbers.items():
        if number is not None:
            check_range(name, number, 1, MOST_PROCESSES)
    with running_launch(args.job) as launch:
        print(launch.scale(**numbers))
    return 0

"""`jaxfleet scale`: changes the number of trainers of a job that `jaxfleet launch` runs."""

import argparse
from typing import Any

from jaxfleet.launch.control import running_launch
from jaxfleet.launch.job_spec import MOST_PROCESSES, check_range


def add_parser(commands: Any, about: str) -> None:
    """Adds the command and its arguments; `about` is its line in the list of commands."""
    parser = commands.add_parser(
        "scale",
        help=about,
        description="Has the jaxfleet launch of this user on this machine start more trainers, "
        "which join the job at a step, or lets those with the highest numbers leave at one. "
        "Nothing is changed unless the job allows it.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--trainers", type=int, required=True, metavar="N", help="how many trainers it is to have")
    add("--job", metavar="ID", help="the job's id, if several run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    check_range("trainers", args.trainers, 1, MOST_PROCESSES)
    with running_launch(args.job) as launch:
        print(launch.scale(args.trainers))
    return 0

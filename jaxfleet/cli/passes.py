"""`jaxfleet passes`: lists the passes with their options."""

import argparse
from typing import Any

import jaxfleet.passes  # noqa: F401  # registers them
from jaxfleet.pipeline import options_of, registered_passes


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("passes", help="list the passes with their options")
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    for name, cls in registered_passes().items():
        summary = (cls.__doc__ or "").strip().split("\n")[0]
        print(f"{name}: {summary}")
        for option in options_of(cls):
            print(f"    {option}")
    return 0

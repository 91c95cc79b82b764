"""`jaxfleet passes`: lists the passes with their options."""

import argparse
from typing import Any

from jaxfleet.cli.user_passes import add_import_option, import_passes
from jaxfleet.pipeline import options_of, registered_passes


def add_parser(commands: Any, about: str) -> None:
    """Adds the command; `about` is its line in the list of commands."""
    parser = commands.add_parser("passes", help=about)
    add_import_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    import_passes(args)
    for name, cls in registered_passes().items():
        summary = (cls.__doc__ or "").strip().split("\n")[0]
        print(f"{name}: {summary}")
        for option in options_of(cls):
            print(f"    {option}")
    return 0

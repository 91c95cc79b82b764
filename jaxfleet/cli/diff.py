"""`jaxfleet diff`: the differences between two programs."""

import argparse
from itertools import zip_longest
from typing import Any

from jaxfleet.cli.app import DIFFERENT
from jaxfleet.cli.files import read_programs, shown
from jaxfleet.ir import Program, diff, unified_diff


def add_parser(commands: Any, about: str) -> None:
    """Adds the command and its arguments; `about` is its line in the list of commands."""
    parser = commands.add_parser(
        "diff",
        help=about,
        description="Shows what is different between programs; spaces and comments are not.",
        epilog="Exits with 0 where nothing is different, with 1 where something is.",
    )
    parser.add_argument("a", metavar="A", help="a file, - for stdin")
    parser.add_argument("b", metavar="B", help="a file, - for stdin")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--structural", action="store_true", help="by operator, not by line")
    how.add_argument("--source", action="store_true", help="compare source lines too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    pairs = zip_longest(read_programs(args.a), read_programs(args.b))
    texts = [_difference(a, b, args) for a, b in pairs]
    different = [text for text in texts if text]
    for text in different:
        print(text)
    return DIFFERENT if different else 0


def _difference(a: Program | None, b: Program | None, args: argparse.Namespace) -> str:
    if a is None or b is None:
        name, program = (shown(args.a), a) if a is not None else (shown(args.b), b)
        return f"only in {name}: program '{program.name}'" if program is not None else ""
    if args.structural:
        found = diff(a, b)
        return "" if found.is_empty else str(found)
    lines = unified_diff(a, b, source=args.source).splitlines()
    return "\n".join([f"--- {shown(args.a)}", f"+++ {shown(args.b)}", *lines[2:]]) if lines else ""

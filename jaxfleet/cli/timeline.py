"""`jaxfleet timeline`: merges the spans of all processes of a job into one trace."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxfleet.observability import merge


def add_parser(commands: Any, about: str) -> None:
    """Adds the command and its arguments; `about` is its line in the list of commands."""
    parser = commands.add_parser(
        "timeline",
        help=about,
        description="Reads the files that processes wrote under JAXFLEET_TRACE_DIR, and writes one "
        "timeline that chrome://tracing and Perfetto show.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="what JAXFLEET_TRACE_DIR was")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="stdout unless given")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    text = json.dumps(merge(args.folder))
    if args.output is None:
        sys.stdout.write(text + "\n")
    else:
        args.output.write_text(text, encoding="utf-8")
    return 0

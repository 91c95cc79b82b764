"""`jaxfleet timeline`: merges the spans of all processes of a job into one trace, or draws them."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxfleet.observability import merge
from jaxfleet.observability.timeline_plot import plot_timeline


def add_parser(commands: Any, about: str) -> None:
    """Adds the command and its arguments; `about` is its line in the list of commands."""
    parser = commands.add_parser(
        "timeline",
        help=about,
        description="Reads the files that processes wrote under JAXFLEET_TRACE_DIR, and writes one "
        "timeline that chrome://tracing and Perfetto show, or a picture of it.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="what JAXFLEET_TRACE_DIR was")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="stdout unless it or --plot is given"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw it instead: .svg, .png or .pdf"
    )
    parser.add_argument(
        "--from", type=float, default=0.0, metavar="S", dest="first_s",
        help="where the picture begins, in seconds since the job did",
    )  # fmt: skip
    parser.add_argument(
        "--to", type=float, metavar="S", dest="last_s", help="where the picture ends"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    timeline = merge(args.folder)
    if args.plot is not None:
        plot_timeline(timeline, args.plot, first_s=args.first_s, last_s=args.last_s)
        if args.output is None:
            return 0
    text = json.dumps(timeline)
    if args.output is None:
        sys.stdout.write(text + "\n")
    else:
        args.output.write_text(text, encoding="utf-8")
    return 0

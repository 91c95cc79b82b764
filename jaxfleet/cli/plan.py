"""`jaxfleet plan`: state held by servers and bytes sent, without running anything."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from jaxfleet.analysis.placement.policies import METHODS
from jaxfleet.analysis.placement.sliced_layout import endpoints_of
from jaxfleet.analysis.placement.transfer_plan import TransferPlan, transfer_plan
from jaxfleet.analysis.step_checks import meaning_rules
from jaxfleet.cli.files import STDIN, read_programs
from jaxfleet.ir import Program
from jaxfleet.passes import Dispatch, GradAllreduce, InsertSendRecv, InsertStartup, SliceVar
from jaxfleet.pipeline import Pass, run_pipeline

_EXAMPLE = """\
example:
  jaxfleet plan --servers 4 --trainers 8 --method balanced step.txt
  jaxfleet plan --startup step.txt
"""


def add_parser(commands: Any, about: str) -> None:
    """Adds the command and its arguments; `about` is its line in the list of commands."""
    parser = commands.add_parser(
        "plan",
        help=about,
        description=(
            "Reads captured steps, cuts and places their parameters, and prints where each block "
            "would live, bytes each way in a step, and what stays whole and why. Runs nothing. "
            "A step that is already placed is shown as it is."
        ),
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", nargs="?", default=STDIN, help="stdin unless given")
    parser.add_argument("--servers", type=int, default=2, metavar="N", help="2 unless given")
    parser.add_argument("--trainers", type=int, default=2, metavar="N", help="2 unless given")
    parser.add_argument("--endpoints", metavar="LIST", default="", help="host:port,host:port")
    parser.add_argument("--method", choices=METHODS, default=METHODS[0], help="how to place")
    smallest = SliceVar.min_block_size
    parser.add_argument("--min-block-size", type=int, default=smallest, metavar="ELEMENTS")
    parser.add_argument("--no-slice", action="store_true", help="keep every parameter whole")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print data, a line for each program")
    shown.add_argument(
        "--startup",
        action="store_true",
        help="print startup programs instead: how a first state comes to servers and trainers",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    for place, program in enumerate(read_programs(args.file)):
        if args.startup:
            print(("\n\n" if place else "") + "\n\n".join(map(str, _startups(program, args))))
            continue
        plan = _plan(program, args)
        if args.json:
            print(json.dumps(plan.to_json()))
        else:
            print(f"\n{plan}" if place else plan)
    return 0


def _plan(program: Program, args: argparse.Namespace) -> TransferPlan:
    placed = _placed(program, args)
    insert = InsertSendRecv(trainers=args.trainers)
    trainer = run_pipeline(placed, [insert]) if args.trainers > 0 else None
    return transfer_plan(placed, trainers=args.trainers, trainer=trainer)


def _startups(program: Program, args: argparse.Namespace) -> Iterator[Program]:
    """Yields the startup programs of the servers and of all trainers that have their own.

    Those of all trainers but the first differ only in the trainer id.
    """
    placed = _placed(program, args)
    for trainer in range(min(args.trainers, 2)):
        yield run_pipeline(placed, [InsertStartup(trainer, trainers=args.trainers)])
    for server in range(len(endpoints_of(placed))):
        yield run_pipeline(placed, [InsertStartup(server=server, trainers=args.trainers)])


def _placed(program: Program, args: argparse.Namespace) -> Program:
    return run_pipeline(program, _passes(program, args), rules=meaning_rules)


def _passes(program: Program, args: argparse.Namespace) -> list[Pass]:
    """Returns the remaining passes; a plan shows even programs that `dispatch` would reject."""
    endpoints = tuple(word.strip() for word in args.endpoints.split(",") if word.strip())
    servers = len(endpoints) or args.servers
    slicing = SliceVar(servers=servers, min_block_size=args.min_block_size, slice=not args.no_slice)
    placing = Dispatch(endpoints=endpoints, servers=servers, method=args.method, max_imbalance=0.0)
    passes: list[Pass] = []
    if "devices" not in program.attrs and args.trainers > 1:
        passes.append(GradAllreduce(devices=args.trainers))
    if "slices" not in program.attrs:
        passes.append(slicing)
    if "placement" not in program.attrs:
        passes.append(placing)
    return passes

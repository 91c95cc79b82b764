"""`jaxfleet top`: what the servers and trainers of a running job do, in a terminal."""

import argparse
import time
from typing import Any

from jaxfleet.cli.output import USER_ERROR, log
from jaxfleet.errors import StrategyError
from jaxfleet.watch import Board

_LONGEST_S = 3600.0
_BETWEEN_S = 0.5  # looks for a job that has not begun


def add_parser(commands: Any) -> None:
    """Adds the command and its arguments."""
    parser = commands.add_parser(
        "top",
        help="show what the servers and trainers of a running job do",
        description="Asks the servers of a job for their metrics, again and again: steps and bytes "
        "a second, how far trainers are apart, and who comes last. Start the job with "
        "JAXFLEET_METRICS_PORT=P: server 0 then answers at port P, server 1 at P + 1.",
    )
    add = parser.add_argument
    add("servers", nargs="+", metavar="[HOST:]PORT", help="where servers give their metrics")
    add("--every", type=float, default=1.0, metavar="S", help="seconds between two looks (1)")
    wait = "the most seconds until a server answers (30); none with --once"
    add("--wait", type=float, default=30.0, metavar="S", help=wait)
    add("--once", action="store_true", help="look twice, print what was seen, and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Shows the job until it ends; returns the exit status."""
    if not 0 < args.every <= _LONGEST_S:
        what = f"--every is {args.every:g}, and is a number of seconds up to {_LONGEST_S:g}"
        raise StrategyError(what)
    board = Board([at if ":" in at else f"127.0.0.1:{at}" for at in args.servers])
    _look_until_one_answers(board, 0.0 if args.once else args.wait)
    if not board.answers:
        for address, looked in board.found.items():
            log(f"error: no metrics at {address}: {looked.error}")
        log("  hint: start the job with JAXFLEET_METRICS_PORT=P, and name the ports P, P + 1, ...")
        return USER_ERROR
    return _once(board, args.every) if args.once else _live(board, args.every)


def _look_until_one_answers(board: Board, wait_s: float) -> None:
    """Looks at a job that may be about to begin: its processes take seconds to start."""
    until = time.monotonic() + wait_s
    board.look()
    if wait_s > 0 and not board.answers:
        log(f"waiting up to {wait_s:g} s for servers: {', '.join(board.addresses)}")
    while not board.answers and time.monotonic() < until:
        time.sleep(_BETWEEN_S)
        board.look()


def _once(board: Board, every_s: float) -> int:
    from rich.console import Console  # noqa: PLC0415  # an extra; the board says so where it lacks

    found = board.tables()
    time.sleep(every_s)
    board.look()
    found = board.tables()
    Console(highlight=False, width=120, soft_wrap=True).print(found)
    return 0


def _live(board: Board, every_s: float) -> int:
    found = board.tables()
    from rich.live import Live  # noqa: PLC0415  # as above

    with Live(found, screen=False, auto_refresh=False) as live:
        try:
            while board.answers:
                time.sleep(every_s)
                board.look()
                if board.answers:  # else what was seen last stays
                    live.update(board.tables(), refresh=True)
        except KeyboardInterrupt:
            return 0
    log("no server answers any more: the job has ended")
    return 0

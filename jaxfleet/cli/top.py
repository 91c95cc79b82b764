"""`jaxfleet top`: live activity of the servers and trainers of a job, in a terminal."""

import argparse
import time
from pathlib import Path
from typing import Any

from jaxfleet.cli.app import USER_ERROR, log
from jaxfleet.errors import StrategyError
from jaxfleet.observability import Board, Sample, read_token, scrape

_LONGEST_S = 3600.0
_HERE = frozenset({"127.0.0.1", "localhost"})
_BETWEEN_S = 0.5  # polls while the job has not begun


def add_parser(commands: Any, about: str) -> None:
    """Adds the command and its arguments; `about` is its line in the list of commands."""
    parser = commands.add_parser(
        "top",
        help=about,
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
    secret = "the job's secret, whose token metrics ask for; a running job of this user and"
    add("--secret-file", type=Path, metavar="FILE", help=f"{secret} machine needs none")
    add("--token", action="store_true", help="print the token, for Prometheus, and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Shows the job until it ends; returns the exit status."""
    if not 0 < args.every <= _LONGEST_S:
        what = f"--every is {args.every:g}, and is a number of seconds up to {_LONGEST_S:g}"
        raise StrategyError(what)
    addresses = [at if ":" in at else f"127.0.0.1:{at}" for at in args.servers]
    tokens = _Tokens(args.secret_file)
    if args.token:
        return _print_token(tokens.of(addresses[0]))
    board = Board(addresses, tokens.scrape)
    _look_until_one_answers(board, 0.0 if args.once else args.wait)
    if not board.answers:
        for address, looked in board.found.items():
            log(f"error: no metrics at {address}: {looked.error}")
        log("  hint: start the job with JAXFLEET_METRICS_PORT=P, and name the ports P, P + 1, ...")
        return USER_ERROR
    return _once(board, args.every) if args.once else _live(board, args.every)


class _Tokens:
    """Finds the tokens of servers' metrics."""

    def __init__(self, secret_file: Path | None) -> None:
        self._of_all = None if secret_file is None else _token_of(secret_file)

    def of(self, address: str) -> str | None:
        """Returns the token of a server; None if none is needed or known."""
        host, _, port = address.rpartition(":")
        if self._of_all is not None or host not in _HERE or not port.isdigit():
            return self._of_all
        return read_token(int(port))

    def scrape(self, address: str) -> Sample:
        return scrape(address, self.of(address))


def _token_of(secret_file: Path) -> str:
    from jaxfleet.transport.secret import metrics_token, read_secret  # noqa: PLC0415  # zmq, for CURVE

    return metrics_token(read_secret(secret_file))


def _print_token(token: str | None) -> int:
    if token is None:
        log("error: no token is known here: give --secret-file, or name the port of a running job")
        return USER_ERROR
    print(token)
    return 0


def _look_until_one_answers(board: Board, wait_s: float) -> None:
    """Polls a job that may be about to begin: its processes take seconds to start."""
    until = time.monotonic() + wait_s
    board.look()
    if wait_s > 0 and not board.answers:
        log(f"waiting up to {wait_s:g} s for servers: {', '.join(board.addresses)}")
    while not board.answers and time.monotonic() < until:
        time.sleep(_BETWEEN_S)
        board.look()


def _once(board: Board, every_s: float) -> int:
    from rich.console import Console  # noqa: PLC0415  # an extra; the board reports it if missing

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
                if board.answers:  # otherwise the last samples stay on screen
                    live.update(board.tables(), refresh=True)
        except KeyboardInterrupt:
            return 0
    log("no server answers any more: the job has ended")
    return 0

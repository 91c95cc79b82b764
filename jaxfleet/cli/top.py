"""`jaxfleet top`: live activity of a job's servers and trainers, in a terminal or a browser."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from jaxfleet.cli.app import USER_ERROR, log
from jaxfleet.errors import StrategyError
from jaxfleet.observability import Board, Sample, read_token, scrape

_LONGEST_S = 3600.0
_HERE = frozenset({"127.0.0.1", "localhost"})
_BETWEEN_S = 0.5  # polls while the job has not begun
_PORT = 9480  # of the board
_LEAST_WEB_S = 0.5  # between two looks of the board, which keeps them for an hour


def add_parser(commands: Any, about: str) -> None:
    """Adds the command and its arguments; `about` is its line in the list of commands."""
    parser = commands.add_parser(
        "top",
        help=about,
        description="Asks the servers or ranks of a job for their metrics, again and again: steps "
        "and bytes a second, how far trainers are apart, and who comes last. Start the job with "
        "JAXFLEET_METRICS_PORT=P: server 0, or rank 0 of a collective job, then answers at port P, "
        "server 1 at P + 1.",
    )
    add = parser.add_argument
    where = "where servers or ranks give their metrics"
    add("servers", nargs="+", metavar="[HOST:]PORT", help=where)
    add("--every", type=float, default=1.0, metavar="S", help="seconds between two looks (1)")
    wait = "the most seconds until a server answers (30, or 0 with --once)"
    add("--wait", type=float, metavar="S", help=wait)
    add("--once", action="store_true", help="look twice, print what was seen, and end")
    secret = "the job's secret, whose token metrics ask for; a running job of this user and"
    add("--secret-file", type=Path, metavar="FILE", help=f"{secret} machine needs none")
    web = (
        f"serve a page for a browser until Ctrl-C, at a port ({_PORT}); write it after the servers"
    )
    add("--web", type=int, nargs="?", const=_PORT, metavar="PORT", help=web)
    host = "address of the page (127.0.0.1); another machine's browser needs a --secret-file"
    add("--host", metavar="HOST", help=host)
    add("--token", action="store_true", help="print the token, for Prometheus, and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Shows the job until it ends; returns the exit status."""
    if not 0 < args.every <= _LONGEST_S:
        what = f"--every is {args.every:g}, and is a number of seconds up to {_LONGEST_S:g}"
        raise StrategyError(what)
    if args.wait is not None and not 0 <= args.wait < float("inf"):
        raise StrategyError(f"--wait is {args.wait:g}, and is a number of seconds")
    if args.web is None and args.host is not None:
        raise StrategyError("--host is the address of the page", hint="give --web too")
    addresses = [at if ":" in at else f"127.0.0.1:{at}" for at in args.servers]
    tokens = _Tokens(args.secret_file)
    if args.token:
        return _print_token(tokens.of(addresses[0]))
    board = Board(addresses, tokens.scrape)
    wait_s = args.wait if args.wait is not None else 0.0 if args.once else 30.0
    if args.web is not None:
        _check_web(args, tokens.of_all)
    _look_until_one_answers(board, wait_s)
    if not board.answers:
        for address, looked in board.found.items():
            log(f"error: no metrics at {address}: {looked.error}")
        log("  hint: start the job with JAXFLEET_METRICS_PORT=P, and name the ports P, P + 1, ...")
        return USER_ERROR
    if args.web is not None:
        known = next((token for token in map(tokens.of, addresses) if token is not None), None)
        return _serve(board, args, known)
    return _once(board, args.every) if args.once else _live(board, args.every)


def _check_web(args: argparse.Namespace, token: str | None) -> None:
    """Checks what the board needs before it waits for a job."""
    from jaxfleet.board import check_host, check_libraries  # noqa: PLC0415  # only with --web

    if args.once:
        raise StrategyError("--once and --web exclude each other", hint="leave one out")
    if not 0 <= args.web < 1 << 16:
        raise StrategyError(f"--web is {args.web}, and is a port up to 65535")
    if args.every < _LEAST_WEB_S:
        what = f"--every is {args.every:g}, and at least {_LEAST_WEB_S:g} with --web"
        raise StrategyError(what, hint="the board keeps an hour of looks")
    if args.host is not None:
        check_host(args.host, token)
    check_libraries()


def _serve(board: Board, args: argparse.Namespace, token: str | None) -> int:
    from jaxfleet.board import Watch, page_token, serve_board  # noqa: PLC0415  # as above

    serve_board(
        Watch(board, args.every),
        host=args.host or "127.0.0.1",
        port=args.web,
        token=None if token is None else page_token(token),
        every_s=args.every,
        on_listening=lambda address: print(
            f"the board is at {address} (Ctrl-C ends it)", flush=True
        ),
    )
    return 0


class _Tokens:
    """Finds the tokens of servers' metrics."""

    def __init__(self, secret_file: Path | None) -> None:
        self.of_all = None if secret_file is None else _token_of(secret_file)

    def of(self, address: str) -> str | None:
        """Returns the token of a server; None if none is needed or known."""
        host, _, port = address.rpartition(":")
        if self.of_all is not None or host not in _HERE or not port.isdigit():
            return self.of_all
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
    found, ends = board.tables(), _Ends(board)
    if not sys.stdout.isatty():
        return _lines(board, ends, every_s)
    from rich.live import Live  # noqa: PLC0415  # as above

    with Live(found, screen=False, auto_refresh=False) as live:
        try:
            while board.answers:
                time.sleep(every_s)
                ends.look()
                if board.answers:  # otherwise the last samples stay on screen
                    live.update(board.tables(), refresh=True)
        except KeyboardInterrupt:
            return 0
    log(ends.text)
    return 0


class _Ends:
    """Looks at the job, and finds whether it ended or died."""

    def __init__(self, board: Board) -> None:
        from jaxfleet.board import EventDetector  # noqa: PLC0415  # as the board's other parts

        self._board, self._detector, self.text = board, EventDetector(), ""
        self._detect()

    def look(self) -> None:
        self._board.look()
        self._detect()

    def _detect(self) -> None:
        found = {at: one.now or one.error for at, one in self._board.found.items()}
        for event in self._detector.look(time.time(), found):
            self.text = event.text


def _lines(board: Board, ends: _Ends, every_s: float) -> int:
    """Prints the board after each look, one after the other: the output is a file or a pipe."""
    from rich.console import Console  # noqa: PLC0415  # as above

    console = Console(highlight=False, width=120, soft_wrap=True)
    try:
        while board.answers:
            console.print(time.strftime("%Y-%m-%d %H:%M:%S"))
            console.print(board.tables())
            sys.stdout.flush()
            time.sleep(every_s)
            ends.look()
    except KeyboardInterrupt:
        return 0
    log(ends.text)
    return 0

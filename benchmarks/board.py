"""Steps of a job that the board in the browser watches, over those of one that nothing watches.

    python benchmarks/board.py [--quick]

The job has 2 trainers and 2 servers and the model of pserver_step.py. One `jaxfleet top --web`
looks at it every second, and one client reads the board's stream as a page does. Both run in
windows of 5 seconds and are stopped in the windows between, so that watched and unwatched windows
take turns within one job. The ratio is the median over neighbouring windows of the steps in
unwatched windows by those in watched ones; neighbouring unwatched windows give its spread.

The bar is 1.01 plus spread. On two cores the board's own processor time is part of it.
"""

import argparse
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import jax
import numpy as np
from common import Bar, print_bars, print_table
from pserver_step import ROWS, WARM_UP, start, train_step

import jaxfleet as jf

WINDOW_S = 5.0
SETTLE_S = 0.5  # after a change, not counted
BAR = 1.01
PATIENCE_S = 120.0


def train(steps: int, out: Path) -> None:
    """Trains as one of the trainers, and writes when each step ended."""
    state, batch = start(2 * ROWS)
    strategy = jf.DistributedStrategy(mode="pserver")
    step = jf.distribute(train_step, example=(state, batch), strategy=strategy)
    ends = []
    for _ in range(steps + WARM_UP):
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        ends.append(time.time())
    if jf.is_first():
        np.save(out, np.array(ends[WARM_UP:]))


@contextmanager
def watching(ports: Sequence[int]) -> Iterator["subprocess.Popen[str]"]:
    """Starts a board, and a client that reads its stream."""
    command = [sys.executable, "-u", "-m", "jaxfleet", "top", *map(str, ports)]
    command += [f"--wait={PATIENCE_S:.0f}", "--web", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as board:
        try:
            address = _address(board)
            threading.Thread(target=_read_stream, args=(address,), daemon=True).start()
            yield board
        finally:
            board.send_signal(signal.SIGCONT)
            board.terminate()


def _address(board: "subprocess.Popen[str]") -> str:
    assert board.stdout is not None
    for line in board.stdout:
        if found := re.search(r"http://\S+", line):
            return found.group()
    raise RuntimeError("the board ended without an address")


def _read_stream(address: str) -> None:
    base, _, token = address.partition("?token=")
    request = urllib.request.Request(f"{base}stream")  # noqa: S310  # the board's own address
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with suppress(OSError), urllib.request.urlopen(request) as stream:  # noqa: S310
        while stream.readline():
            pass


def windows(job: "subprocess.Popen[bytes]", board: "subprocess.Popen[str]") -> list[float]:
    """Lets the board run and stop in turns until the job ends; returns the times of changes."""
    changes, runs = [time.time()], True
    while True:
        with suppress(subprocess.TimeoutExpired):
            job.wait(WINDOW_S)
            return changes
        runs = not runs
        board.send_signal(signal.SIGCONT if runs else signal.SIGSTOP)
        changes.append(time.time())


def ratios(ends: np.ndarray, changes: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns unwatched over watched rates of neighbours, and unwatched over the next unwatched."""
    inside = [at for at in range(len(changes) - 1) if changes[at] > ends[0]]
    inside = [at for at in inside if changes[at + 1] < ends[-1]]
    rate = {at: _rate(ends, changes[at] + SETTLE_S, changes[at + 1]) for at in inside}
    unwatched = [at for at in inside if at % 2]  # the first window is watched
    pairs = [rate[at] / rate[at + 1] for at in unwatched if at + 1 in rate]
    return pairs, [rate[at] / rate[at + 2] for at in unwatched if at + 2 in rate]


def _rate(ends: np.ndarray, begin: float, end: float) -> float:
    return float(((ends >= begin) & (ends < end)).sum() / (end - begin))


def measure(steps: int) -> tuple[list[float], list[float]]:
    ports = free_ports()
    environment = {**os.environ, "JAXFLEET_METRICS_PORT": str(ports[0])}
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "ends.npy"), Path(folder, "log")
        command = [sys.executable, "-m", "jaxfleet", "launch", "--restarts", "0"]
        command += ["--servers", "2", "--trainers", "2", __file__]
        command += ["--steps", str(steps), "--out", str(out)]
        with (
            log.open("wb") as file,
            subprocess.Popen(command, env=environment, stdout=file, stderr=file) as job,
            watching(ports) as board,
        ):
            changes = windows(job, board)
        if job.returncode:
            raise RuntimeError(log.read_text())
        return ratios(np.load(out), changes)


def free_ports() -> list[int]:
    """Returns two ports in a row that were free a moment ago."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            with suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                return [port, port + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description="The benchmark board.")
    parser.add_argument("--quick", action="store_true", help="few steps: a look, not a verdict")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--out", type=Path, help="be a trainer, and write the times there")
    arguments = parser.parse_args()
    steps = arguments.steps or (1500 if arguments.quick else 10_000)
    if arguments.out is not None:
        train(steps, arguments.out)
        return
    watched, unwatched = measure(steps)
    spread = statistics.stdev(unwatched) / len(watched) ** 0.5
    ratio = statistics.median(watched)
    rows = [[str(len(watched)), f"{ratio:.4f}", f"{spread:.4f}"]]
    print_table(("pairs of windows", "unwatched over watched", "spread of the median"), rows)
    print_bars("board", [Bar("unwatched over watched", ratio, BAR, spread)])


if __name__ == "__main__":
    main()

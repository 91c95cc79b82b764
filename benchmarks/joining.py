"""Throughput of a sync job before and after a trainer joins it, and the steps until it is back.

    python benchmarks/joining.py [--runs 3] [--steps 200]

`jaxfleet launch` runs 2 servers and 2 trainers of the model of chaos.py; after some steps a third
trainer joins. The table has the median time of a step before, and of the last `--steps` steps with
three trainers; the time of the step that the new one takes part in first, in which all make their
programs for three; and how many steps, from that one on, went by until the mean of the next ten was
at most 1.25 of that of the last ones.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from chaos_training import batch_of, report, start, train_step, train_until
from common import Bar, print_bars, print_table
from launched import LONGEST_S, LaunchedJob, ending_on_signals

import jaxfleet as jf
from jaxfleet.env import PserverRole, cluster_environment

SERVERS, TRAINERS, JOB = 2, 2, "joining"
STEPS_BAR = 2  # until the throughput is back
NEAR, WINDOW = 1.25, 10
AHEAD = 50


def train(folder: Path, *, joins: bool) -> None:
    """Trains to the step in the file `stop`, and writes when each step ended."""
    state: Any = start()
    strategy = jf.DistributedStrategy(
        mode="pserver", min_block_size=1024, on_trainer_lost="continue"
    )
    step = jf.distribute(train_step, example=(state, batch_of(0)), strategy=strategy)
    numbers: list[int] = []
    ends: list[float] = []
    rank = "joined" if joins else str(jf.rank())

    def ended(number: int) -> None:
        numbers.append(number)
        ends.append(time.monotonic())
        report(number, 0.0)

    with step:
        train_until(folder / "stop", step, state, ended)
    np.savez(folder / f"{rank}.npz", numbers=np.array(numbers), ends=np.array(ends))


@contextmanager
def joined(job: LaunchedJob, secret: Path, words: Sequence[str]) -> Iterator[None]:
    """Context of a process that joins a job as one more trainer."""
    role = PserverRole(
        role="trainer",
        trainers=TRAINERS,
        trainer_id=0,
        endpoints=tuple(job.endpoints[number] for number in range(SERVERS)),
        job=JOB,
        secret_file=secret,
        joins=True,
    )
    environment = {**cluster_environment(role), "NPROC": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, *words, "--joins"], env=environment, stdout=subprocess.DEVNULL
    )
    try:
        yield
        if code := process.wait(LONGEST_S):
            raise RuntimeError(f"the process that joined ended with {code}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def run(folder: Path, steps: int, output: Path | None) -> tuple[float, float, float, int]:
    """Returns seconds of a step before, after and at the join, and the steps until it is back."""
    secret = folder / "secret"
    secret.write_text(os.urandom(16).hex())
    secret.chmod(0o600)
    trained = ["--train", str(folder)]
    words = [f"--job={JOB}", f"--servers={SERVERS}", f"--trainers={TRAINERS}", "--threads=1"]
    words += [f"--secret-file={secret}", __file__, *trained]
    with LaunchedJob(words, trainers=TRAINERS, output=output) as job:
        job.wait_steps(0.0, steps)
        with joined(job, secret, trained):
            while not any("3 trainers instead of 2" in line for _, line in list(job.lines)):
                job.wait_steps(time.monotonic(), 1)
            job.wait_steps(time.monotonic(), steps + AHEAD)
            written = folder / "stop.new"
            written.write_text(str(max(job.newest.values()) + AHEAD))
            written.rename(folder / "stop")
            job.finish()
    with np.load(folder / "joined.npz") as found:
        first = int(found["numbers"][0])
    with np.load(folder / "0.npz") as found:
        took = np.diff(found["ends"])  # took[n - 2] of step n, as numbers begin at 1
    at = first - 2
    before, after = np.median(took[at - steps // 2 : at]), np.median(took[-steps:])
    back = next(
        count
        for count in range(len(took) - at - WINDOW)
        if took[at + count :][:WINDOW].mean() <= NEAR * took[-steps:].mean()
    )
    return float(before), float(after), float(took[at]), back


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The benchmark joining.")
    parser.add_argument("--quick", action="store_true", help="one run of few steps")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="with either number of trainers")
    parser.add_argument("--output", type=Path, help="file for the output of the jobs")
    parser.add_argument("--train", type=Path, help="be a trainer, with this folder")
    parser.add_argument("--joins", action="store_true", help="be the one that joins")
    arguments = parser.parse_args(words)
    if arguments.train is not None:
        train(arguments.train, joins=arguments.joins)
        return
    runs, steps = (1, 50) if arguments.quick else (arguments.runs, arguments.steps)
    found = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory(prefix="joining-") as name, ending_on_signals():
            found.append(run(Path(name), steps, arguments.output))
    rows = [
        [str(at), *(f"{1e3 * value:.1f}" for value in each[:3]), str(each[3])]
        for at, each in enumerate(found, 1)
    ]
    print_table(
        ("run", "before, ms", "after, ms", "the joining step, ms", "steps until back"), rows
    )
    load = os.getloadavg()[1]
    print(f"load {load:.1f} (5 minutes)")
    worst = max(each[3] for each in found)
    median = statistics.median(each[3] for each in found)
    print_bars(
        "joining",
        [
            Bar("steps until the throughput is back, median", median, STEPS_BAR),
            Bar("the same, worst", worst, STEPS_BAR),
        ],
    )


if __name__ == "__main__":
    main()

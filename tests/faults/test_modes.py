"""Servers and trainers die in each mode in which trainers do not wait at every step.

Gradients and the rate are 1, so parameters and rows of a table count the applied updates.
`test_relaxed.py` covers async, with the behaviour common to all modes; `test_asynchronous_modes.py`
covers both on a network in memory.
"""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.faults.cluster import Jobs
from tests.faults.test_launched import launched, numbers

pytestmark = [pytest.mark.processes, pytest.mark.grid, pytest.mark.timeout(400)]

STEPS, EVERY, TRAINERS = 12, 2, 2
MODES = {
    "half_async": ("--kind=count_rows", f"--merge={EVERY}"),
    "dc_asgd": ("--kind=count_rows", "--compensation=0"),  # a corrected gradient is not a count
    "geo": ("--kind=count_rows", f"--k-steps={EVERY}"),
    "fl": ("--kind=count", f"--k-steps={EVERY}"),
}


def options(mode: str) -> tuple[str, ...]:
    return (*MODES[mode], f"--communication={mode}", "--step-timeout=30")


def counted(mode: str) -> float:
    """Returns the value of parameters and rows if every update counts once."""
    if mode == "fl":
        return -STEPS  # all are equal, and so is their mean
    if mode == "half_async":
        return -TRAINERS * STEPS / EVERY
    if mode == "dc_asgd":
        return -TRAINERS * STEPS
    rest, served = 0.0, 0.0  # of one trainer: unsent and sent updates
    for _ in range(STEPS // EVERY):
        share = (rest - EVERY) / TRAINERS
        rest, served = rest - EVERY - share, served + share
    return TRAINERS * served


@pytest.mark.parametrize("mode", MODES)
def test_a_server_that_is_started_again_applies_everything_once(mode: str, tmp_path: Path) -> None:
    with Jobs(tmp_path) as jobs:
        job = launched(jobs, f"--steps={STEPS}", *options(mode))
        job.reaches("step 4.")
        (victim,) = numbers(job.text())["server 0"]
        os.kill(victim, signal.SIGKILL)
        assert job.ends() == 0
        assert "it is started again (1 of 3)" in job.text()
        # The trainer that ends last sees all pushes of both.
        values = [np.concatenate([array.ravel() for name, array in result.items()
                                  if (name.startswith("[0]") and "counted" not in name)
                                  or name == "rows"]) for result in jobs.results()]  # fmt: skip
        last = min(values, key=np.sum)
        np.testing.assert_array_equal(last, np.full_like(last, counted(mode)))


@pytest.mark.parametrize("mode", ["half_async", "geo", "fl"])  # dc_asgd waits as half_async does
def test_a_server_that_is_gone_is_named(mode: str, tmp_path: Path) -> None:
    words = (*options(mode), "--steps=500", "--pause=0.05")
    with Jobs(tmp_path, trainers=1, options=words) as jobs:
        server, trainer = jobs.server(), jobs.trainer(0)
        trainer.reaches("step 5.")
        server.kill()
        trainer.fails("PeerLostError", "server 0 at 127.0.0.1:", "was lost at step")


def test_a_trainer_that_is_gone_is_named_by_those_who_exchange(tmp_path: Path) -> None:
    words = ("--steps=500", "--pause=0.05")
    # Two jobs start at once here, which may take longer than a step.
    geo, fl = (
        Jobs(tmp_path / m, options=[*options(m), *words], step_s=30.0) for m in ("geo", "fl")
    )
    with geo, fl:
        pairs = [(jobs.server(), *jobs.all_trainers()) for jobs in (geo, fl)]
        for _, left, killed in pairs:
            left.reaches("step 5.")
            killed.kill()
        for server, left, _ in pairs:
            left.fails("PeerLostError: trainer 1 is lost")
            server.kill()  # it would wait for the other trainers

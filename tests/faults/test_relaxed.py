"""Processes that do not wait for each other at every step are killed, suspended and restarted.

`test_asynchronous_modes.py` has the same on a network in memory.
"""

import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.cluster import REAL_LOST_S, Jobs

pytestmark = [pytest.mark.processes, pytest.mark.grid, pytest.mark.timeout(400)]

STEPS = 30
BOUND = 3
ASYNC = ("--kind=count", "--communication=async", f"--staleness={BOUND}", "--step-timeout=30")


def staleness(folder: Path, trainer: int) -> Any:
    """Returns the age of the values with which a trainer's steps computed."""
    return json.loads((folder / f"result-{trainer}.trainer.json").read_text())["staleness"]


def test_a_killed_server_is_brought_level_and_applies_each_push_once(tmp_path: Path) -> None:
    options = [*ASYNC, f"--steps={STEPS}", "--pause=0.1", "--replay-bytes=4000"]
    with Jobs(tmp_path, servers=2, returns_s=30.0, options=options, step_s=30.0) as jobs:
        servers, trainers = jobs.all_servers(), jobs.all_trainers()
        for number, step in [(0, 3), (1, 9), (0, 16)]:
            trainers[0].reaches(f"step {step}.")
            servers[number].kill()
            servers[number] = jobs.server(number)
        assert [one.ends() for one in trainers] == [0, 0]
        assert [one.ends() for one in servers] == [0, 0]
        # The trainer that ends last sees all pushes of both: every push counts, exactly once.
        lowest = [min(array.min() for name, array in result.items() if name.startswith("[0]"))
                  for result in jobs.results()]  # fmt: skip
        assert min(lowest) == -2.0 * STEPS
        last = jobs.results()[int(np.argmin(lowest))]
        assert {float(x) for n, a in last.items() if n.startswith("[0]") for x in a.flat} == {
            -2.0 * STEPS
        }


def test_a_stopped_trainer_is_waited_for_at_the_bound(tmp_path: Path) -> None:
    options = [*ASYNC, f"--steps={STEPS}", "--pause=0.05"]
    with Jobs(tmp_path, options=options, step_s=30.0) as jobs:
        server, (first, stopped) = jobs.server(), jobs.all_trainers()
        stopped.reaches("step 5.")
        stopped.send(signal.SIGSTOP)
        time.sleep(REAL_LOST_S - 0.5)  # long enough to pass the bound, too short to be lost
        stopped.send(signal.SIGCONT)
        assert [first.ends(), stopped.ends(), server.ends()] == [0, 0, 0]
        found = [staleness(tmp_path, trainer) for trainer in range(2)]
        assert found[0]["max"] == BOUND  # it reached the bound and waited
        assert found[1]["max"] <= BOUND


def test_a_killed_trainer_is_named_when_the_bound_is_reached(tmp_path: Path) -> None:
    options = [*ASYNC, "--steps=500", "--pause=0.05"]
    with Jobs(tmp_path, options=options, step_s=30.0) as jobs:
        server, (left, killed) = jobs.server(), jobs.all_trainers()
        left.reaches("step 3.")
        killed.kill()
        left.fails("PeerLostError: trainer 1 is lost", "for its step")
        server.kill()  # it would wait for the other trainers, up to the limit of a step


def test_a_trainer_that_ends_early_is_not_waited_for(tmp_path: Path) -> None:
    options = [*ASYNC, f"--steps={STEPS}", "--pause=0.02"]
    with Jobs(tmp_path, options=options, step_s=30.0) as jobs:
        server = jobs.server()
        trainers = [jobs.trainer(0), jobs.trainer(1, "--stop-at=6")]
        assert [one.ends() for one in trainers] == [0, 0]
        assert server.ends() == 0
        (full,) = {float(array.min()) for name, array in jobs.results()[0].items()
                   if name.startswith("[0]")}  # fmt: skip
        assert full == -(STEPS + 5.0)

"""Trainers of a launched job that lease samples change while it runs; each sample counts once."""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.faults.cluster import Jobs, Started, wait_until
from tests.faults.test_launched import numbers
from tests.launch.jobs import runs

pytestmark = [pytest.mark.grid, pytest.mark.processes, pytest.mark.timeout(300)]

JOB = f"leases-{os.getpid()}"
TRAINING = Path(__file__).with_name("leasing_training.py")
SAMPLES = 4000


def scale(trainers: int) -> None:
    words = ["scale", f"--trainers={trainers}", f"--job={JOB}"]
    command = [sys.executable, "-m", "jaxfleet", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def has(job: Started, trainers: int) -> bool:
    changes = re.findall(r"server 0: the job has (\d+) trainers? now", job.text())
    return bool(changes) and int(changes[-1]) == trainers


def steps_of(job: Started) -> int:
    """Returns the number of steps that all trainers have made together."""
    return len(re.findall(r"step \d+\.", job.text()))


@pytest.mark.parametrize("mode", ["async", "geo"])
def test_each_sample_counts_once_whatever_trainers_come_and_go(mode: str, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "jaxfleet", "launch", "--spares=0", f"--job={JOB}"]
    launch += ["--servers=2", "--trainers=1:2", str(TRAINING), f"--out={tmp_path}"]
    launch += [f"--samples={SAMPLES}", f"--communication={mode}", "--pause=0.1"]
    with Jobs(tmp_path) as jobs:
        job = jobs.start("launch", launch, None)
        wait_until(lambda: "step 5." in job.text(), "step 5")
        scale(3)
        wait_until(partial(has, job, 3), "3 trainers")
        os.kill(numbers(job.text())["trainer 1"][-1], signal.SIGKILL)
        wait_until(partial(has, job, 2), "2 trainers, without the one that was killed")
        scale(1)
        wait_until(partial(has, job, 1), "1 trainer")
        scale(2)
        wait_until(partial(has, job, 2), "2 trainers")
        made = steps_of(job)
        wait_until(lambda: steps_of(job) > made + 10, "steps of two trainers")
        assert job.ends(240.0) == 0
        text = job.text()
    assert not any(runs(pid) for pids in numbers(text).values() for pid in pids)
    told = re.findall(r"data \{'epoch': 0, 'once': (\d+), 'twice': (\d+), 'never': (\d+)\}", text)
    assert set(told) == {(str(SAMPLES), "0", "0")}
    for lag, bound in re.findall(r"lag (\d+) of (\d+)", text):
        assert int(lag) <= int(bound)
    if mode == "async":  # geo sends changes in parts
        found = [np.load(path)["counts"] for path in tmp_path.glob("counts-*.npz")]
        counts = max(found, key=np.sum)
        # Of the killed one, a push may have reached one server alone.
        assert np.count_nonzero(counts != 1.0) <= 2 * 4

"""The trainers of a launched job change while it runs, and the result is that of one device."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxfleet as jf
from tests.faults import training
from tests.faults.cluster import PATIENT_S, TRAINING, Jobs, Started, read, wait_until
from tests.faults.test_launched import numbers
from tests.launch.jobs import runs

pytestmark = [pytest.mark.grid, pytest.mark.processes, pytest.mark.timeout(500)]

ROWS = 12  # one to four trainers can share them
JOB = f"scaled-{os.getpid()}"
ATOL = 1e-4  # of values up to 1, after hundreds of steps of Adam; float32 sums in another order


def launched(jobs: Jobs, *options: str, launch: Sequence[str], servers: int = 1) -> Started:
    words = [sys.executable, "-m", "jaxfleet", "launch", "--spares=0", f"--job={JOB}", *launch]
    words.append(f"--servers={servers}")
    script = [str(TRAINING), f"--out={jobs.folder}", f"--rows={ROWS}", *options]
    return jobs.start("launch", [*words, *script], None)


def scale(trainers: int) -> tuple[int, str]:
    words = [sys.executable, "-m", "jaxfleet", "scale", f"--trainers={trainers}", f"--job={JOB}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def last_step(text: str) -> int:
    return max(int(number) for number in re.findall(r"step (\d+)\. loss", text))


def has(job: Started, trainers: int) -> bool:
    """Whether a job whose trainers have changed, perhaps one by one, has this number."""
    changes = re.findall(r"server 0: from step \d+ on, (\d+) trainers", job.text())
    return bool(changes) and int(changes[-1]) == trainers


def end_soon(job: Started, until: Path) -> int:
    """Lets all trainers end after the same step, which is to come; returns its number."""
    last = last_step(job.text()) + 40
    written = until.with_suffix(".new")
    written.write_text(str(last))
    written.replace(until)
    return last


def on_one_device(steps: int) -> dict[str, np.ndarray]:
    data = list(training.batches(steps, rows=ROWS))
    state = training.start("plain")
    step: Any = jf.distribute(training.make_step("plain"), (state, data[0]), "single")
    for batch in data:
        state, _ = step(state, batch)
    return training.named(state)


def check_result(jobs: Jobs, trainers: int, steps: int) -> None:
    results = [read(jobs.result(number)) for number in range(trainers)]
    for name, wanted in on_one_device(steps).items():
        for found in results:
            np.testing.assert_array_equal(found[name], results[0][name], err_msg=name)
        np.testing.assert_allclose(results[0][name], wanted, rtol=0, atol=ATOL, err_msg=name)


def test_two_then_four_then_one_then_three_trainers_are_as_one_device(tmp_path: Path) -> None:
    until = tmp_path / "until"
    words = [f"--lost-after={PATIENT_S}", "--step-timeout=120", "--on-lost=continue"]
    words += ["--steps=100000", "--pause=0.2", f"--until={until}"]
    with Jobs(tmp_path) as jobs:
        launch = ["--trainers=1:2", f"--log-dir={tmp_path / 'logs'}"]
        job = launched(jobs, *words, launch=launch, servers=2)
        job.reaches("step 4.")
        status, text = scale(5)
        assert status == 2
        assert "error: a batch of 12 rows cannot be divided among 5 trainers" in text
        for trainers in (4, 1, 3):
            status, text = scale(trainers)
            assert status == 0, text
            wait_until(partial(has, job, trainers), f"{trainers} trainers")
        last = last_step(job.text())
        wait_until(lambda: last_step(job.text()) > last + 10, "steps of three trainers")
        done = end_soon(job, until)
        assert job.ends(240.0) == 0
        text = job.text()
        assert len(re.findall(r"trainer [123] ended well: it has left the job", text)) == 3
        assert not any(runs(pid) for pids in numbers(text).values() for pid in pids)
        assert f"step {done}." in (tmp_path / "logs" / "trainer-5.log").read_text()
        check_result(jobs, 3, done)


def test_a_launch_goes_on_without_a_trainer_that_is_killed(tmp_path: Path) -> None:
    until = tmp_path / "until"
    words = ["--lost-after=15", "--step-timeout=120", "--on-lost=continue"]
    words += ["--steps=100000", "--pause=0.2", f"--until={until}"]
    with Jobs(tmp_path) as jobs:
        job = launched(jobs, *words, launch=["--trainers=1:2"])
        job.reaches("step 4.")
        (victim,) = numbers(job.text())["trainer 1"]
        os.kill(victim, signal.SIGKILL)
        job.reaches("1 trainers instead of 2")
        done = end_soon(job, until)
        assert job.ends(240.0) == 0
        assert "the job goes on with 1 trainer\n" in job.text()
        check_result(jobs, 1, done)


def test_a_job_whose_trainers_are_fixed_refuses_and_goes_on(tmp_path: Path) -> None:
    until = tmp_path / "until"
    words = ["--lost-after=30", "--steps=100000", "--pause=0.2", f"--until={until}"]
    with Jobs(tmp_path) as jobs:
        job = launched(jobs, "--communication=async", *words, launch=["--trainers=2"])
        job.reaches("step 4.")
        status, text = scale(4)
        assert status == 2
        assert f"error: job '{JOB}': no trainer can join: they can in communication 'sync'" in text
        end_soon(job, until)
        assert job.ends(240.0) == 0

"""The servers of a launched job change while it runs, and the result is that of a fixed number."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.faults.cluster import PATIENT_S, TRAINING, Jobs, Started, check_same, read, wait_until
from tests.faults.memory_training import TrainingJob
from tests.faults.test_launched import numbers
from tests.faults.test_scaled import JOB, end_soon, last_step, scale
from tests.launch.jobs import runs

pytestmark = [pytest.mark.grid, pytest.mark.processes, pytest.mark.timeout(500)]

WORDS = (f"--lost-after={PATIENT_S}", "--step-timeout=120", "--steps=100000", "--pause=0.2")


def launched(jobs: Jobs, *options: str, launch: Sequence[str] = ()) -> Started:
    """Launches a job of two servers and two trainers."""
    words = [sys.executable, "-m", "jaxfleet", "launch", f"--job={JOB}", *launch]
    words += ["--servers=2", "--trainers=2", str(TRAINING), f"--out={jobs.folder}"]
    return jobs.start("launch", [*words, *WORDS, *options], None)


def has(job: Started, servers: str) -> bool:
    return f"the job has {servers} now" in job.text()


def check_as_fixed(jobs: Jobs, steps: int) -> None:
    """Checks that the trainers' results are those of a job of two servers, bit for bit."""
    fixed = TrainingJob(options=[f"--steps={steps}", "--kind=norm"]).run()
    check_same([read(jobs.result(number)) for number in range(2)], fixed.results()[0])


def test_two_then_three_then_one_server_are_as_two_and_processes_stay(tmp_path: Path) -> None:
    until = tmp_path / "until"
    with Jobs(tmp_path) as jobs:
        launch = ["--spares=0", f"--log-dir={tmp_path / 'logs'}"]
        job = launched(jobs, "--kind=norm", f"--until={until}", launch=launch)
        job.reaches("step 4.")
        for servers, counted in (3, "3 servers"), (1, "1 server"):
            status, text = scale(f"--servers={servers}")
            assert status == 0, text
            wait_until(partial(has, job, counted), counted)
        last = last_step(job.text())
        wait_until(lambda: last_step(job.text()) > last + 4, "steps with one server")
        done = end_soon(job, until)
        assert job.ends(240.0) == 0
        text = job.text()
        pids = numbers(text)
        assert {name: len(found) for name, found in pids.items()} == dict.fromkeys(
            ("server 0", "server 1", "server 2", "trainer 0", "trainer 1"), 1
        )
        assert len(re.findall(r"server [12] (?:ended well: it )?has left the job", text)) == 2
        assert not any(runs(pid) for found in pids.values() for pid in found)
        check_as_fixed(jobs, done)


@pytest.mark.parametrize("victim", ["trainer 1", "server 0"])
def test_a_job_that_loses_a_process_as_it_moves_starts_again_with_the_new_servers(
    victim: str, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    with Jobs(tmp_path) as jobs:
        again = ["--spares=0", "--max-restarts=1", "--save-every=2steps", "--restarts=0"]
        job = launched(jobs, "--kind=norm", f"--until={until}", launch=again)
        job.reaches("step 4.")
        status, text = scale("--servers=3")
        assert status == 0, text
        job.reaches("the job has 3 servers from step")
        os.kill(numbers(job.text())[victim][0], signal.SIGKILL)
        job.reaches("the whole job is started again (1 of 1)")
        before = len(job.text())
        wait_until(lambda: "loss" in job.text()[before:], "steps of the next start")
        done = end_soon(job, until)
        assert job.ends(240.0) == 0
        pids = numbers(job.text())
        assert {len(found) for found in pids.values()} == {2}
        assert "server 2" in pids
        assert not any(runs(pid) for found in pids.values() for pid in found)
        check_as_fixed(jobs, done)


def test_a_job_that_may_not_change_its_servers_refuses_and_goes_on(tmp_path: Path) -> None:
    until = tmp_path / "until"
    with Jobs(tmp_path) as jobs:
        job = launched(jobs, "--communication=async", f"--until={until}", launch=["--spares=0"])
        job.reaches("step 4.")
        status, text = scale("--servers=3")
        assert status == 2
        what = "no server can be added or removed: its trainers do not wait for each other"
        assert f"error: job '{JOB}': {what}" in text
        end_soon(job, until)
        assert job.ends(240.0) == 0
        assert "server 2" not in job.text()

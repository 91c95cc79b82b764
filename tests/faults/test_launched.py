"""A launched job survives the loss of a server, and ends when interrupted."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.faults.cluster import PATIENT_S, TRAINING, Jobs, Started, check_same
from tests.faults.conftest import Undisturbed
from tests.launch.jobs import runs

PATIENT = (f"--lost-after={PATIENT_S}", "--step-timeout=60")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def launched(jobs: Jobs, *options: str) -> Started:
    """Launches a job of two servers and two trainers."""
    launch = [sys.executable, "-m", "jaxfleet", "launch", "--servers=2", "--trainers=2"]
    script = [str(TRAINING), f"--out={jobs.folder}", "--pause=0.15", *options]
    return jobs.start("launch", [*launch, *script], None)


def numbers(text: str) -> dict[str, list[int]]:
    """Returns the pids that a launch printed, by process name."""
    found: dict[str, list[int]] = {}
    for name, number in re.findall(r"((?:server|trainer) \d): process (\d+)", text):
        found.setdefault(name, []).append(int(number))
    return found


def test_a_server_that_is_killed_is_started_again_and_the_result_is_right(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with Jobs(tmp_path) as jobs:
        job = launched(jobs, "--steps=14", "--kind=norm", *PATIENT)
        job.reaches("step 4.")
        (victim,) = numbers(job.text())["server 0"]
        os.kill(victim, signal.SIGKILL)
        assert job.ends() == 0
        text = job.text()
        assert "it is started again (1 of 3)" in text
        assert re.search(r"launch +\| server 0: process \d+, at \S+, start 2\n", text)
        assert re.search(r"server 0 +\| .*server 0 goes on after step \d+, from its check", text)
        assert not any(runs(pid) for pids in numbers(text).values() for pid in pids)
        check_same(jobs.results(), undisturbed("norm", 14))


@pytest.mark.grid  # by default, `tests/launch/test_stopping.py` has every signal
def test_a_job_that_is_interrupted_leaves_nobody(tmp_path: Path) -> None:
    with Jobs(tmp_path) as jobs:
        job = launched(jobs, "--steps=500")
        job.reaches("step 2.")
        job.send(signal.SIGINT)
        assert job.ends() == 128 + signal.SIGINT
        assert not any(runs(pid) for pids in numbers(job.text()).values() for pid in pids)

"""A launched job survives the loss of a server, and ends when interrupted."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.cluster import PATIENT_S, TRAINING, Jobs, Started, check_same, wait_until
from tests.faults.conftest import Undisturbed
from tests.launch.jobs import runs

PATIENT = (f"--lost-after={PATIENT_S}", "--step-timeout=60")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def launched(jobs: Jobs, *options: str, launch: Sequence[str] = ()) -> Started:
    """Launches a job of two servers and two trainers."""
    words = [sys.executable, "-m", "jaxfleet", "launch", "--servers=2", "--trainers=2", *launch]
    script = [str(TRAINING), f"--out={jobs.folder}", "--pause=0.15", *options]
    return jobs.start("launch", [*words, *script], None)


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


def spare_of(launcher: int) -> int | None:
    """Returns the spare process of a launch, None if there is none yet."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (
                (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdecimal() else []
            )
            if b"--standby" in words and b"gate.py" not in words[3]:
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == launcher:
                    return int(folder.name)
    return None


@pytest.mark.grid  # by default, `tests/launch/test_spares.py` has spares that import nothing
def test_a_spare_takes_the_place_of_a_server_and_the_result_is_right(
    tmp_path: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the job's folders are there
    with Jobs(tmp_path) as jobs:
        job = launched(jobs, "--steps=40", "--kind=norm", "--pause=0.6", *PATIENT)
        job.reaches("step 4.")
        wait_until(lambda: spare_of(job.process.pid) is not None, "a spare process")
        spare = spare_of(job.process.pid)
        assert spare is not None
        compiled = sorted(tmp_path.glob("jaxfleet-*/jit_*-cache"))
        assert len(compiled) > 2
        compiled[-1].write_bytes(compiled[-1].read_bytes()[:-40])  # is compiled again
        (victim,) = numbers(job.text())["server 0"]
        os.kill(victim, signal.SIGKILL)
        assert job.ends() == 0
        text = job.text()
        assert numbers(text)["server 0"] == [victim, spare]
        assert f"process {spare}\n" in text  # its own words, under the name of the server
        assert not any(runs(pid) for pids in numbers(text).values() for pid in pids)
        check_same(jobs.results(), undisturbed("norm", 40))
        assert not list(tmp_path.glob("jaxfleet-*"))


@pytest.mark.grid  # by default, `test_trainers_return.py` has trainers in memory
def test_a_trainer_that_is_killed_is_started_again_and_the_result_is_right(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with Jobs(tmp_path) as jobs:
        words = ["--steps=14", "--kind=norm", "--on-lost=wait", *PATIENT]
        job = launched(jobs, *words, launch=["--trainer-restarts=1"])
        job.reaches("step 4.")
        (victim,) = numbers(job.text())["trainer 1"]
        os.kill(victim, signal.SIGKILL)
        assert job.ends() == 0
        text = job.text()
        assert "trainer 1 killed by SIGKILL" in text
        assert "it is started again (1 of 1)" in text
        assert len(numbers(text)["trainer 1"]) == 2
        check_same(jobs.results(), undisturbed("norm", 14))


@pytest.mark.grid  # `tests/launch/test_stopping.py` has every signal
def test_a_job_that_is_interrupted_leaves_nobody(tmp_path: Path) -> None:
    with Jobs(tmp_path) as jobs:
        job = launched(jobs, "--steps=500")
        job.reaches("step 2.")
        job.send(signal.SIGINT)
        assert job.ends() == 128 + signal.SIGINT
        assert not any(runs(pid) for pids in numbers(job.text()).values() for pid in pids)

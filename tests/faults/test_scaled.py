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
EXAMPLE = Path(__file__).parents[2] / "examples" / "ctr.py"
CLICKS = (str(EXAMPLE), "--rows=400000", "--batch=120", "--on-lost=continue")
DIGITS = (str(Path(__file__).with_name("digits_training.py")), "--pause=0.6")
DRIFT = 2e-2  # of a loss, after thousands of steps; two trainers that stay drift by 3e-3
SCORE_DRIFT = 0.003  # printed with three digits; one of 360 images of digits
ATOL = 1e-4  # of values up to 1, after hundreds of steps of Adam; float32 sums in another order


def launched(jobs: Jobs, *options: str, launch: Sequence[str], servers: int = 1) -> Started:
    words = [sys.executable, "-m", "jaxfleet", "launch", "--spares=0", f"--job={JOB}", *launch]
    words.append(f"--servers={servers}")
    script = [str(TRAINING), f"--out={jobs.folder}", f"--rows={ROWS}", *options]
    return jobs.start("launch", [*words, *script], None)


def scale(*words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "jaxfleet", "scale", *words, f"--job={JOB}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def ask(*words: str) -> None:
    status, text = scale(*words)
    assert status == 0, text


def last_step(text: str) -> int:
    return max(int(number) for number in re.findall(r"step (\d+)\. loss", text))


def has(job: Started, trainers: int) -> bool:
    """Whether a job whose trainers have changed, perhaps one by one, has this number."""
    changes = re.findall(r"server 0: from step \d+ on, (\d+) trainers?", job.text())
    return bool(changes) and int(changes[-1]) == trainers


def has_taken(job: Started, option: str) -> bool:
    """Whether a job has the number of trainers or servers that an option asked for."""
    number = int(option.partition("=")[2])
    if option.startswith("--trainers"):
        return has(job, number)
    return f"the job has {number} server{'s' * (number > 1)} now" in job.text()


def end_soon(job: Started, until: Path) -> int:
    """Lets all trainers end after the same step, which is to come; returns its number."""
    last = last_step(job.text()) + 40
    written = until.with_suffix(".new")
    written.write_text(str(last))
    written.replace(until)
    return last


def on_one_device(steps: int, kind: str) -> dict[str, np.ndarray]:
    data = list(training.batches(steps, kind, rows=ROWS))
    state = training.start(kind)
    step: Any = jf.distribute(training.make_step(kind), (state, data[0]), "single")
    for batch in data:
        state, _ = step(state, batch)
    return training.named(state) | training.rows_of(step, kind)


def check_result(jobs: Jobs, trainers: int, steps: int, kind: str = "plain") -> None:
    results = [read(jobs.result(number)) for number in range(trainers)]
    for name, wanted in on_one_device(steps, kind).items():
        for found in results:
            np.testing.assert_array_equal(found[name], results[0][name], err_msg=name)
        np.testing.assert_allclose(results[0][name], wanted, rtol=0, atol=ATOL, err_msg=name)


@pytest.mark.parametrize("kind", ["plain", "table"])
def test_two_then_four_then_one_then_three_trainers_are_as_one_device(
    kind: str, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    words = [f"--lost-after={PATIENT_S}", "--step-timeout=120", "--on-lost=continue"]
    words += ["--steps=100000", "--pause=0.2", f"--until={until}", f"--kind={kind}", "--look-up"]
    with Jobs(tmp_path) as jobs:
        launch = ["--trainers=1:2", f"--log-dir={tmp_path / 'logs'}"]
        job = launched(jobs, *words, launch=launch, servers=2)
        job.reaches("step 4.")
        status, text = scale("--trainers=5")
        assert status == 2
        assert "error: a batch of 12 rows cannot be divided among 5 trainers" in text
        for trainers in (4, 1, 3):
            ask(f"--trainers={trainers}")
            wait_until(partial(has, job, trainers), f"{trainers} trainers")
        last = last_step(job.text())
        wait_until(lambda: last_step(job.text()) > last + 10, "steps of three trainers")
        done = end_soon(job, until)
        assert job.ends(240.0) == 0
        text = job.text()
        assert len(re.findall(r"trainer [123] ended well: it has left the job", text)) == 3
        assert not any(runs(pid) for pids in numbers(text).values() for pid in pids)
        assert f"step {done}." in (tmp_path / "logs" / "trainer-5.log").read_text()
        check_result(jobs, 3, done, kind)


@pytest.mark.parametrize("kind", ["plain", "table"])
def test_servers_killed_while_trainers_change_cost_no_result(kind: str, tmp_path: Path) -> None:
    """One dies when it is asked, and both die when the first of the others have been told."""
    until = tmp_path / "until"
    words = [f"--lost-after={PATIENT_S}", "--step-timeout=120", "--on-lost=continue"]
    words += ["--steps=100000", "--pause=0.2", f"--until={until}", f"--kind={kind}", "--look-up"]
    with Jobs(tmp_path) as jobs:
        job = launched(jobs, *words, launch=["--trainers=1:2", "--restarts=100"], servers=2)
        job.reaches("step 4.")
        for trainers, servers in ((4, (1,)), (1, (0,)), (3, (0, 1))):
            ask(f"--trainers={trainers}")
            for server in servers:
                os.kill(numbers(job.text())[f"server {server}"][-1], signal.SIGKILL)
            wait_until(partial(has, job, trainers), f"{trainers} trainers")
        last = last_step(job.text())
        wait_until(lambda: last_step(job.text()) > last + 10, "steps of three trainers")
        done = end_soon(job, until)
        assert job.ends(240.0) == 0
        pids = numbers(job.text())
        assert [len(pids[f"server {server}"]) for server in (0, 1)] == [3, 3]
        check_result(jobs, 3, done, kind)


def losses(text: str) -> dict[int, set[str]]:
    """Returns the printed losses of each step of the click model, by any trainer."""
    found: dict[int, set[str]] = {}
    for step, loss in re.findall(r"step (\d+), loss (\d\.\d+)", text):
        found.setdefault(int(step), set()).add(loss)
    return found


@pytest.mark.parametrize("script", [CLICKS, DIGITS], ids=["clicks", "digits"])
def test_an_example_whose_processes_change_learns_as_on_one_device(
    script: Sequence[str], tmp_path: Path
) -> None:
    launch = [sys.executable, "-m", "jaxfleet", "launch", "--spares=0", f"--job={JOB}"]
    launch += ["--servers=2", "--trainers=1:2", *script, "--mode=pserver"]
    with Jobs(tmp_path) as jobs:
        job = jobs.start("launch", launch, None)
        wait_until(lambda: bool(losses(job.text())), "a printed loss")
        for words in ("--trainers=4", "--servers=3", "--trainers=1", "--servers=1", "--trainers=3"):
            ask(words)
            wait_until(partial(has_taken, job, words), words)
        alone = jobs.start("one device", [sys.executable, *script], None)
        assert [job.ends(400.0), alone.ends(400.0)] == [0, 0]
    assert [len(numbers(job.text())[f"server {n}"]) for n in range(3)] == [1, 1, 1]
    expected, found = losses(alone.text()), losses(job.text())
    assert found.keys() == expected.keys()
    assert all(len(of_step) == 1 for of_step in found.values())  # all trainers print the same
    drift = max(abs(float(*found[step]) - float(*expected[step])) for step in expected)
    assert drift < DRIFT
    scores = set(re.findall(r"test (?:AUC|accuracy) (\d\.\d+)", job.text()))
    (of_one,) = re.findall(r"test (?:AUC|accuracy) (\d\.\d+)", alone.text())
    assert len(scores) == 1
    assert abs(float(*scores) - float(of_one)) < SCORE_DRIFT


def test_a_launch_goes_on_without_a_trainer_that_is_killed(tmp_path: Path) -> None:
    until = tmp_path / "until"
    words = ["--lost-after=15", "--step-timeout=120", "--on-lost=continue"]
    words += ["--steps=100000", "--pause=0.2", f"--until={until}"]
    with Jobs(tmp_path) as jobs:
        job = launched(jobs, *words, launch=["--trainers=1:2"])
        job.reaches("step 4.")
        (victim,) = numbers(job.text())["trainer 1"]
        os.kill(victim, signal.SIGKILL)
        job.reaches("1 trainer instead of 2")
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
        status, text = scale("--trainers=4")
        assert status == 2
        what = "no trainer can join: in communication 'async' they can with batch='local'"
        assert f"error: job '{JOB}': {what}" in text
        end_soon(job, until)
        assert job.ends(240.0) == 0

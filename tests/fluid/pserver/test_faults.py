"""Failures of real processes are reported, with names, in time; no process remains."""

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.cluster import Jobs, Started
from tests.fluid.pserver import script

DEADLINE_S = 15.0  # of waits that must fail; starting takes 5 s on a busy machine
MARGIN_S = 35.0  # on top of it, for processes that start on a busy machine
LONG = ["--steps=1000", "--pause=0.05"]

pytestmark = pytest.mark.processes


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGS_rpc_deadline", str(int(DEADLINE_S * 1000)))


waits_in_vain = pytest.mark.usefixtures("_short")


def server(jobs: Jobs, number: int = 0, *options: str) -> Started:
    cluster = jobs.cluster(role="pserver", current_endpoint=jobs.endpoints[number])
    return jobs.start(f"server {number}", command(options), cluster)


def trainer(jobs: Jobs, number: int, *options: str) -> Started:
    return jobs.start(f"trainer {number}", command(options), jobs.cluster(trainer_id=number))


def command(options: Sequence[str]) -> list[str]:
    return [sys.executable, str(Path(script.__file__)), *options]


@pytest.mark.grid
def test_who_ends_early_in_good_order_leaves_the_others_to_go_on(tmp_path: Path) -> None:
    with Jobs(tmp_path, trainers=3) as jobs:
        served = server(jobs)
        ways = ("--steps=6", "--end-at=3", "--exit-at=4")
        long, *short = [trainer(jobs, number, way) for number, way in enumerate(ways)]
        assert [one.ends() for one in (*short, long, served)] == [0, 0, 0, 0]
        assert "step 6. loss" in long.text()
        assert "served" in served.text()


@pytest.mark.grid
@waits_in_vain
def test_a_trainer_that_is_killed_is_named_to_the_others(tmp_path: Path) -> None:
    with Jobs(tmp_path) as jobs:
        served = server(jobs)
        left, killed = trainer(jobs, 0, *LONG), trainer(jobs, 1, *LONG)
        killed.reaches("step 3.")
        killed.send(signal.SIGKILL)
        left.fails("PeerLostError: trainer 1 is lost", "of step", timeout_s=DEADLINE_S + MARGIN_S)
        killed.ends()
        served.send(signal.SIGTERM)
        assert served.ends() == 0
        assert "served" in served.text()


@pytest.mark.grid
@waits_in_vain
def test_a_script_that_fails_is_lost_to_the_others_and_not_taken_for_one_that_ended(
    tmp_path: Path,
) -> None:
    with Jobs(tmp_path) as jobs:
        served = server(jobs)
        left, failed = trainer(jobs, 0, *LONG), trainer(jobs, 1, "--raise-at=4")
        failed.fails("RuntimeError: the script failed")
        left.fails("PeerLostError: trainer 1 is lost", timeout_s=DEADLINE_S + MARGIN_S)
        words = ("no trainer lives: trainer", "gave up: the script failed")
        served.fails(*words, timeout_s=DEADLINE_S + MARGIN_S)


@pytest.mark.grid
@waits_in_vain
def test_a_trainer_that_takes_no_steps_is_waited_for_no_longer_than_the_deadline(
    tmp_path: Path,
) -> None:
    with Jobs(tmp_path) as jobs:
        served = server(jobs)
        left, idle = trainer(jobs, 0, *LONG), trainer(jobs, 1, "--stop-at=3")
        left.fails(
            "PeerLostError: trainer 1: last heartbeat", "step 2", timeout_s=DEADLINE_S + MARGIN_S
        )
        idle.kill()
        served.send(signal.SIGTERM)
        served.ends()


@pytest.mark.grid
@waits_in_vain
def test_a_server_that_is_killed_is_named(tmp_path: Path) -> None:
    with Jobs(tmp_path, servers=2, trainers=1) as jobs:
        first, second = server(jobs, 0), server(jobs, 1)
        one = trainer(jobs, 0, *LONG)
        one.reaches("step 3.")
        second.kill()
        one.fails("PeerLostError: server 1 at", "was lost", timeout_s=DEADLINE_S + MARGIN_S)
        words = ("no trainer lives: trainer 0", "gave up: server 1 at")
        first.fails(*words, timeout_s=DEADLINE_S + MARGIN_S)


@pytest.mark.grid
@waits_in_vain
def test_a_server_that_never_starts_is_named(tmp_path: Path) -> None:
    with Jobs(tmp_path, servers=2, trainers=1) as jobs:
        first = server(jobs, 0)
        since = time.monotonic()
        one = trainer(jobs, 0)
        one.fails("ConnectError: trainer 0 waited", "for hello from server 1 at")
        assert time.monotonic() - since < DEADLINE_S + MARGIN_S
        first.send(signal.SIGTERM)
        first.ends()


@pytest.mark.grid
def test_a_trainer_with_another_script_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with Jobs(tmp_path) as jobs:
        served, good = server(jobs), trainer(jobs, 0)
        other = trainer(jobs, 1, "--optimizer=Adam")
        other.fails("ProgramError: trainer 1 reports program", "and the server")
        right = trainer(jobs, 1)
        assert [one.ends() for one in (good, right, served)] == [0, 0, 0]

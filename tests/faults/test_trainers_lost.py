"""A trainer process that dies, hangs, fails or leaves early is named by the others' errors.

`test_lost_peers.py` has the same on a network in memory.
"""

import signal
import time
from pathlib import Path

import pytest

from tests.faults.cluster import MARGIN_S, REAL_LOST_S, STEP_S, Jobs, Started, check_same
from tests.faults.conftest import Undisturbed

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

LONG = ("--steps=500", "--pause=0.05", "--step-timeout=30")


def start(jobs: Jobs, *options: str) -> tuple[Started, list[Started]]:
    """Starts a job of one server; returns it and its trainers after some steps."""
    server = jobs.server()
    trainers = [jobs.trainer(0), jobs.trainer(1, *options)]
    trainers[0].reaches("step 3.")
    return server, trainers


@pytest.mark.grid
def test_a_trainer_that_is_killed_is_named_to_the_others(tmp_path: Path) -> None:
    with Jobs(tmp_path, options=[*LONG, "--connect=150"]) as jobs:
        left, killed = jobs.all_trainers()
        for trainer in (left, killed):
            trainer.reaches("begins.")  # imports may take longer than the server waits for them
        server = jobs.server()
        left.reaches("step 3.")
        killed.kill()
        left.fails("PeerLostError: trainer 1 is lost: silent for", "trainer 0 waited")
        server.fails("no trainer lives: trainer", timeout_s=REAL_LOST_S + STEP_S + MARGIN_S)


@pytest.mark.grid
def test_a_trainer_that_stands_still_is_named_and_fails_when_it_goes_on(tmp_path: Path) -> None:
    with Jobs(tmp_path, options=LONG, step_s=30.0) as jobs:
        server, (left, stopped) = start(jobs)
        stopped.send(signal.SIGSTOP)
        left.fails("PeerLostError: trainer 1 is lost", "last heartbeat")
        stopped.send(signal.SIGCONT)
        stopped.fails("PeerLostError", timeout_s=REAL_LOST_S + MARGIN_S)
        server.kill()  # it would wait for the other trainers, up to the limit of a step


@pytest.mark.grid
@pytest.mark.parametrize("options", [[], ["--without-with"]], ids=str)
def test_a_script_that_raises_is_its_own_error_and_named_to_the_others(
    options: list[str], tmp_path: Path
) -> None:
    with Jobs(tmp_path, options=[*LONG, *options], step_s=30.0) as jobs:
        server, (left, failed) = start(jobs, "--raise-at=6")
        failed.fails("RuntimeError: the script failed")
        left.fails("PeerLostError: trainer 1 is lost", timeout_s=REAL_LOST_S + MARGIN_S)
        server.kill()  # as above


@pytest.mark.grid
def test_a_trainer_that_leaves_early_is_named_to_the_others(tmp_path: Path) -> None:
    with Jobs(tmp_path, options=LONG, step_s=30.0) as jobs:
        server, (left, early) = start(jobs, "--stop-at=6")
        assert early.ends() == 0
        left.fails("PeerLostError: trainer 1 left after step 5", timeout_s=MARGIN_S)
        server.kill()  # as above


@pytest.mark.grid
def test_a_server_that_stands_still_for_a_moment_changes_nothing(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    # Longer than trainers may be silent, and shorter than servers may be.
    options = ["--steps=14", "--pause=0.05", "--step-timeout=30"]
    with Jobs(tmp_path, servers=2, returns_s=20.0, step_s=30.0, options=options) as jobs:
        servers, trainers = jobs.all_servers(), jobs.all_trainers()
        trainers[0].reaches("step 3.")
        servers[0].send(signal.SIGSTOP)
        time.sleep(REAL_LOST_S + 1.5)
        servers[0].send(signal.SIGCONT)
        assert [one.ends() for one in (*trainers, *servers)] == [0, 0, 0, 0]
        check_same(jobs.results(), undisturbed("plain", 14))


@pytest.mark.grid
def test_a_server_that_stands_still_is_named(tmp_path: Path) -> None:
    with Jobs(tmp_path, options=LONG, step_s=30.0) as jobs:
        server, trainers = start(jobs)
        server.send(signal.SIGSTOP)
        for trainer in trainers:
            trainer.fails(
                "PeerLostError: server 0 at",
                "was lost at step",
                f"no heartbeat for {REAL_LOST_S} s",
            )
        server.send(signal.SIGCONT)
        server.kill()  # as above

"""A server process is killed and restarted: trainers continue, to the same parameters.

`test_server_recovery.py` has the same, and more moments, on a network in memory; by default,
`test_launched.py` kills the server of a real job.
"""

import re
import time
from pathlib import Path

import pytest

from jaxfleet.checkpoint.series import CheckpointSeries
from tests.faults.cluster import Jobs, check_same
from tests.faults.conftest import Undisturbed

pytestmark = [pytest.mark.processes, pytest.mark.grid, pytest.mark.timeout(400)]

STEPS = 14


def returning(folder: Path, kind: str, *options: str) -> Jobs:
    words = [f"--kind={kind}", f"--steps={STEPS}", "--pause=0.15", "--step-timeout=30", *options]
    return Jobs(folder, servers=2, returns_s=30.0, options=words, step_s=30.0)


@pytest.mark.parametrize("kind", ["plain", "clip", "norm", "table"])
def test_servers_that_are_killed_one_after_the_other_change_nothing(
    kind: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    # The first dies right after the first checkpoint, of the initial state; the second has several
    # steps to catch up; then the first again, after a forced checkpoint.
    with returning(tmp_path, kind, "--replay-bytes=4000") as jobs:
        servers, trainers = jobs.all_servers(), jobs.all_trainers()
        for number, step in [(0, 1), (1, 5), (0, 9)]:
            trainers[0].reaches(f"step {step}.")
            servers[number].kill()
            servers[number] = jobs.server(number)
        assert [one.ends() for one in trainers] == [0, 0]
        assert [one.ends() for one in servers] == [0, 0]
        check_same(jobs.results(), undisturbed(kind, STEPS))
        saved = CheckpointSeries(tmp_path / "own" / "faults" / "server0")
        chains = [saved.chain(step) for step in saved.steps()]
        assert len(chains) > 1
        # Those of tables are incremental, up to a number that is then followed by a full one.
        assert any(len(chain) > 1 for chain in chains) == (kind == "table")


def test_a_server_that_is_killed_before_it_has_a_state_is_given_it_again(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with returning(tmp_path, "norm") as jobs:
        first, other = jobs.all_servers()
        trainer = jobs.trainer(1)  # which waits for the state of trainer 0
        other.reaches("serving")
        time.sleep(4.0)
        first.kill()
        servers = [jobs.server(0), other]
        trainers = [jobs.trainer(0), trainer]
        assert [one.ends() for one in (*trainers, *servers)] == [0, 0, 0, 0]
        check_same(jobs.results(), undisturbed("norm", STEPS))


def test_a_server_that_does_not_come_back_is_named(tmp_path: Path) -> None:
    with Jobs(tmp_path, servers=1, returns_s=3.0, options=["--steps=500", "--pause=0.1"]) as jobs:
        server, *trainers = *jobs.all_servers(), *jobs.all_trainers()
        # Heartbeats are a second apart: after 2 s every trainer has reported its step once.
        trainers[0].reaches("step 20.")
        server.kill()
        for number, trainer in enumerate(trainers):
            text = trainer.fails("PeerLostError", "server 0 at 127.0.0.1:", "was lost at step")
            assert f"trainer {number} waited for" in text
            assert re.search("its last reported '(after )?step", text)


def test_a_server_that_lost_its_state_is_refused(tmp_path: Path) -> None:
    options = ["--steps=500", "--pause=0.1"]
    with Jobs(tmp_path, servers=1, returns_s=30.0, step_s=30.0, options=options) as jobs:
        server, *trainers = *jobs.all_servers(), *jobs.all_trainers()
        trainers[0].reaches("step 3.")
        server.kill()
        (tmp_path / "own").rename(tmp_path / "lost")
        again = jobs.server(0)
        for trainer in trainers:
            trainer.fails("PeerLostError", "server 0", "came back without a state")
        again.kill()

"""A trainer process that is killed and started again: the result is that of an undisturbed job.

`test_trainers_return.py` has all other moments and combinations on a network in memory.
"""

from pathlib import Path

import pytest

from tests.faults.cluster import Jobs, check_same
from tests.faults.conftest import Undisturbed

pytestmark = [pytest.mark.processes, pytest.mark.grid, pytest.mark.timeout(400)]

STEPS = 12
WORDS = (f"--steps={STEPS}", "--kind=norm", "--pause=0.1", "--on-lost=wait", "--return-s=120")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_trainer_that_is_started_again_changes_nothing(
    killed: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with Jobs(tmp_path, step_s=60.0, options=[*WORDS, "--step-timeout=60"]) as jobs:
        server, trainers = jobs.server(), jobs.all_trainers()
        trainers[killed].reaches("step 4.")
        trainers[killed].kill()
        again = jobs.trainer(killed, restart=1)  # at once: servers do not count it as lost yet
        assert [one.ends() for one in (again, trainers[1 - killed], server)] == [0, 0, 0]
        assert "step 3." not in again.text()
        assert f"step {STEPS}." in again.text()
        assert f"trainer {killed} has returned" in server.text()
        check_same(jobs.results(), undisturbed("norm", STEPS))

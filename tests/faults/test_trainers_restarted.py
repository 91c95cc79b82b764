"""A trainer process that is killed and started again: the result is that of an undisturbed job.

`test_trainers_return.py` and `test_relaxed_trainers_return.py` have all other moments and
combinations on a network in memory.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.faults.cluster import Jobs, check_same
from tests.faults.conftest import Undisturbed
from tests.faults.test_asynchronous_modes import lowest

pytestmark = [pytest.mark.processes, pytest.mark.grid, pytest.mark.timeout(400)]

STEPS = 12
WORDS = (f"--steps={STEPS}", "--pause=0.1", "--on-lost=wait", "--return-s=120")


@pytest.mark.parametrize(("killed", "kind"), [(0, "norm"), (1, "table")])
def test_a_killed_trainer_that_is_started_again_changes_nothing(
    killed: int, kind: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    words = [*WORDS, f"--kind={kind}", "--step-timeout=60"]
    with Jobs(tmp_path, step_s=60.0, options=words) as jobs:
        server, trainers = jobs.server(), jobs.all_trainers()
        trainers[killed].reaches("step 4.")
        trainers[killed].kill()
        again = jobs.trainer(killed, restart=1)  # at once: servers do not count it as lost yet
        assert [one.ends() for one in (again, trainers[1 - killed], server)] == [0, 0, 0]
        assert "step 3." not in again.text()
        assert f"step {STEPS}." in again.text()
        assert f"trainer {killed} has returned" in server.text()
        check_same(jobs.results(), undisturbed(kind, STEPS))


def test_a_killed_trainer_of_a_relaxed_mode_counts_once(tmp_path: Path) -> None:
    words = (f"--steps={STEPS}", "--kind=count_rows", "--communication=async", "--staleness=4",
             "--merge=3", "--pause=0.1", "--on-lost=wait", "--return-s=120")  # fmt: skip
    with Jobs(tmp_path, step_s=60.0, options=[*words, "--step-timeout=60"]) as jobs:
        server, trainers = jobs.server(), jobs.all_trainers()
        trainers[1].reaches("step 4.")
        trainers[1].kill()
        again = jobs.trainer(1, restart=1)
        assert [one.ends() for one in (again, trainers[0], server)] == [0, 0, 0]
        assert f"step {STEPS}." in again.text()
        assert "trainer 1 has returned" in server.text()
        assert lowest(jobs.results()) == {-2.0 * STEPS}


def test_a_job_goes_on_without_a_killed_trainer_and_with_one_that_joins(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    steps = 400
    words = (f"--steps={steps}", "--pause=0.1", "--on-lost=continue", "--step-timeout=120")
    with Jobs(tmp_path, servers=2, step_s=120.0, options=words) as jobs:
        servers, trainers = jobs.all_servers(), jobs.all_trainers()
        trainers[1].reaches("step 4.")
        trainers[1].kill()
        more = jobs.trainer(0, joins=True)
        servers[0].reaches("1 trainer instead of 2")
        servers[0].reaches("2 trainers instead of 1")
        assert [one.ends(240.0) for one in (trainers[0], more, *servers)] == [0, 0, 0, 0]
        assert "step 4." not in more.text()
        first, second = jobs.results()
        check_same([second], first)
        for name, wanted in undisturbed("plain", steps).items():
            np.testing.assert_allclose(first[name], wanted, rtol=0, atol=1e-4, err_msg=name)

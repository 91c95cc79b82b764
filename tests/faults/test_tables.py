"""Tables on servers that are killed and restarted: the same rows, bit for bit."""

from pathlib import Path

import pytest

from tests.faults import table_training
from tests.faults.cluster import Jobs, check_same

pytestmark = [pytest.mark.processes, pytest.mark.grid, pytest.mark.timeout(400)]

SCRIPT = Path(table_training.__file__)
STEPS = 14


def jobs(folder: Path, *options: str, returns_s: float = 30.0, step_s: float = 30.0) -> Jobs:
    words = [f"--steps={STEPS}", "--pause=0.15", f"--step-timeout={step_s}", *options]
    return Jobs(folder, servers=2, returns_s=returns_s, options=words, step_s=step_s, script=SCRIPT)


def test_servers_that_are_killed_change_no_bit_of_any_row(tmp_path: Path) -> None:
    # The first dies with only its first checkpoint; the second has several steps to catch up;
    # then the first again, after forced incremental checkpoints.
    with jobs(tmp_path, "--replay-bytes=20000") as running:
        servers, trainers = running.all_servers(), running.all_trainers()
        for number, step in [(0, 1), (1, 5), (0, 9)]:
            trainers[0].reaches(f"step {step}.")
            servers[number].kill()
            servers[number] = running.server(number)
        assert [one.ends() for one in trainers] == [0, 0]
        assert [one.ends() for one in servers] == [0, 0]
        check_same(running.results(), table_training.expected(STEPS, 2))
        saved = {path.name for path in (tmp_path / "own" / "faults" / "server0").glob("step-*")}
        assert len(saved) > 2  # increments, and their base


def test_a_gradient_that_is_not_finite_ends_the_job_by_its_name(tmp_path: Path) -> None:
    with jobs(tmp_path, "--nan-at=3", returns_s=0.0, step_s=6.0) as running:
        servers, trainers = running.all_servers(), running.all_trainers()
        trainers[1].fails("ProgramError", "push rows of step 3, table", "are not finite")
        trainers[0].fails("PeerLostError", "trainer 1 is lost", "rows of 'users'")
        for server in servers:  # they would wait for live trainers before they end
            server.kill()

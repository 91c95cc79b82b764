"""A rank that is killed, suspended, gone or deviating is named by the others, which end.

`test_coordinator.py` has all these verdicts without processes; by default, one of them runs as a
job.
"""

from pathlib import Path

import pytest

from tests.cluster.failing import AFTER, LOST_S, STEP_S
from tests.cluster.ranks import LONGEST_S, ranks
from tests.faults.cluster import Started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(500)]

SCRIPT = Path(__file__).with_name("failing.py")
MARGIN_S = 40.0  # beside a deadline, for a busy machine
OWN_BATCHES = "UserWarning: ranks 0 and 1 bring different batches"
NEXT = f"step {AFTER + 1}: "


def assert_ends(rank: Started, *words: str, timeout_s: float) -> None:
    """Fails unless a rank ends by itself with status 1 and prints these words."""
    text = rank.fails(*words, timeout_s=timeout_s)
    assert rank.process.returncode == 1, text
    assert "Traceback" in text


@pytest.mark.grid
@pytest.mark.parametrize(("what", "rank"), [("kill", 0), ("stop", 1)])
def test_a_rank_without_a_sign_of_life_is_named(tmp_path: Path, what: str, rank: int) -> None:
    with ranks([SCRIPT, what, str(rank)], tmp_path, count=2) as started:
        started[rank].reaches("now", LONGEST_S)
        named = f"PeerLostError: {NEXT}rank {rank} is lost: silent for"
        assert_ends(started[1 - rank], named, timeout_s=2 * LOST_S + MARGIN_S)


@pytest.mark.grid
def test_a_rank_that_leaves_early_is_named_and_told(tmp_path: Path) -> None:
    with ranks([SCRIPT, "leave", "1"], tmp_path, count=2) as started:
        started[1].reaches("now", LONGEST_S)
        left = f"rank 1 left after step {AFTER}, and rank 0 waits for it"
        hint = "hint: let all ranks run as many steps"
        assert_ends(started[0], f"PeerLostError: {NEXT}{left}", hint, timeout_s=MARGIN_S)
        started[1].fails("jaxfleet: rank 1 ends", left, timeout_s=MARGIN_S)
        assert not [each for each in started if OWN_BATCHES in each.text()]


@pytest.mark.grid
def test_a_rank_that_is_late_is_named_and_ended(tmp_path: Path) -> None:
    with ranks([SCRIPT, "sleep", "1"], tmp_path, count=2) as started:
        started[1].reaches("now", LONGEST_S)
        late = f"PeerLostError: {NEXT}rank 1 is late: rank 0 waited {STEP_S:g} s for 'running'"
        assert_ends(started[0], late, timeout_s=STEP_S + MARGIN_S)
        words = "jaxfleet: rank 1 is ended", "but stood here", "in do"
        started[1].fails(*words, timeout_s=STEP_S + 2 * LOST_S + MARGIN_S)


def test_an_error_of_one_rank_is_told_by_all(tmp_path: Path) -> None:
    with ranks([SCRIPT, "fail", "1"], tmp_path, count=2) as started:
        error = "ValueError: no such file: rows.csv"
        assert_ends(started[1], error, timeout_s=LONGEST_S)
        # Rank 0 learns of it between two steps, or in the next.
        ended = f": rank 1 ended in step {AFTER}: {error}"
        assert_ends(started[0], "PeerLostError: step ", ended, timeout_s=MARGIN_S)
        for each in started:  # they train on their own rows, without `batch="local"`
            assert each.text().count(OWN_BATCHES) == 1, each.text()


@pytest.mark.grid
def test_another_program_is_refused_by_all_before_a_step(tmp_path: Path) -> None:
    with ranks([SCRIPT, "program", "1"], tmp_path, count=2) as started:
        differs = "is not the same on all ranks: rank 1 differs from rank 0; line "
        for each in started:
            assert_ends(each, "ProgramError: train_step with 8 rows", differs, timeout_s=LONGEST_S)
            assert "now\n" not in each.text()


@pytest.mark.grid
def test_a_batch_of_another_shape_is_refused_by_all(tmp_path: Path) -> None:
    with ranks([SCRIPT, "rows", "1"], tmp_path, count=2) as started:
        shapes = "train_step with 16 rows', and rank 0 runs train_step with 8 rows"
        for each in started:
            assert_ends(each, f"ProgramError: {NEXT}", shapes, timeout_s=LONGEST_S)

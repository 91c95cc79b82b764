"""Processes of one group compute what one process computes with the whole batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.group.ranks import all_end_well, ranks
from tests.group.training import ROWS, STEPS, leaves, one_process
from tests.runtime import toys
from tests.runtime.comparing import FLOAT32

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

SCRIPT = Path(__file__).with_name("training.py")
GROUPS = [(2, 1), (2, 2), (4, 1), (4, 2)]
Trained = tuple[Path, int]


@pytest.fixture(scope="module", params=GROUPS, ids=lambda x: f"{x[0]}_processes_of_{x[1]}")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One job for all tests of a size: where its results are, and how many ranks it had."""
    count, devices = request.param
    folder = tmp_path_factory.mktemp("ranks")
    with ranks([SCRIPT, folder], folder, count=count, devices=devices) as started:
        all_end_well(started)
    return folder, count


def of_rank(folder: Path, name: str, rank: int) -> list[np.ndarray]:
    """Returns what a rank left."""
    with np.load(folder / f"{name}-{rank}.npz") as found:
        return [found[key] for key in found]


def assert_alike(found: Sequence[np.ndarray], tree: Any, where: str) -> None:
    """Fails unless arrays are equal, floats but for the order in which float32 is summed.

    More devices, and more processes, add up in another order; see `FLOAT32`.
    """
    for x, y in zip(found, leaves(tree), strict=True):
        assert x.shape == y.shape, where
        if np.issubdtype(x.dtype, np.floating):
            np.testing.assert_allclose(x, y, rtol=FLOAT32, atol=FLOAT32, err_msg=where)
        else:
            np.testing.assert_array_equal(x, y, err_msg=where)


def test_ranks_train_as_one_process(trained: Trained) -> None:
    folder, count = trained
    wanted = one_process()
    for rank in range(count):
        assert_alike(of_rank(folder, "whole batches", rank), wanted, f"rank {rank}")


def test_ranks_have_the_same_to_the_bit(trained: Trained) -> None:
    folder, count = trained
    first = of_rank(folder, "whole batches", 0)
    for rank in range(1, count):
        for x, y in zip(of_rank(folder, "whole batches", rank), first, strict=True):
            assert x.tobytes() == y.tobytes(), f"rank {rank}"


def test_ranks_that_bring_their_own_rows_train_on_all(trained: Trained) -> None:
    folder, count = trained
    state, metrics = toys.plain(STEPS, toys.rows(ROWS))
    rows = ROWS // count
    for rank in range(count):
        own = {**metrics, "errors": metrics["errors"][rank * rows : (rank + 1) * rows]}
        assert_alike(of_rank(folder, "own rows", rank), (state, own), f"rank {rank}")


def test_what_rank_0_saves_all_restore(trained: Trained) -> None:
    folder, count = trained
    wanted = toys.plain(STEPS, toys.rows(ROWS))
    for rank in range(count):
        assert_alike(of_rank(folder, "saved", rank), wanted, f"rank {rank}")

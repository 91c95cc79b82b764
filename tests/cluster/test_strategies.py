"""Every collective strategy gives the same on several processes as on one."""

from pathlib import Path

import jax
import numpy as np
import pytest

from tests.cluster.ranks import all_end_well, ranks
from tests.cluster.strategies import STRATEGIES, trained
from tests.collective.models import ALLOWED, OPTIMIZERS, start

# `test_equality.py` runs ranks in these modes one by one; here they are combined.
pytestmark = [pytest.mark.processes, pytest.mark.grid, pytest.mark.timeout(500)]

SCRIPT = Path(__file__).with_name("strategies.py")
COUNT, DEVICES = 2, 4


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs one job for all strategies; returns the folder of its results."""
    folder = tmp_path_factory.mktemp("strategies")
    with ranks([SCRIPT, folder], folder, count=COUNT, devices=DEVICES // COUNT) as started:
        all_end_well(started)
    return folder


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_ranks_do_what_devices_of_one_process_do(
    job: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STRATEGIES, name, {**STRATEGIES[name], "devices": DEVICES})
    wanted, _ = trained(name)
    for rank in range(COUNT):
        with np.load(job / f"{name}-{rank}.npz") as found:
            for key, value in zip([k for k in found if k != "own"], wanted, strict=True):
                np.testing.assert_allclose(found[key], value, rtol=ALLOWED, atol=ALLOWED)


def test_a_process_holds_its_part_of_the_optimizer(job: Path) -> None:
    leaves = jax.tree.leaves(start(OPTIMIZERS["clipped"]()).opt)
    whole = sum(leaf.nbytes for leaf in leaves)
    for rank in range(COUNT):
        with np.load(job / f"sharded-{rank}.npz") as found:
            assert found["own"] <= whole / COUNT + 8  # a step counter is replicated

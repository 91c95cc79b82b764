"""Processes of one group compute the same as one process with the whole batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from tests.cluster.ranks import all_end_well, ranks
from tests.cluster.training import ROWS, STEPS, WAYS, leaves, one_process
from tests.collective import models
from tests.collective.test_local_sgd import Oracle as AveragingOracle
from tests.collective.test_merge import Oracle as MergingOracle
from tests.runtime import toys
from tests.runtime.comparing import FLOAT32

pytestmark = [pytest.mark.grid, pytest.mark.processes, pytest.mark.timeout(500)]

SCRIPT = Path(__file__).with_name("training.py")
GROUPS = [(2, 2), (2, 1), (4, 1), (4, 2)]
Trained = tuple[Path, int]
SMALL = 8  # bytes of Adam's step counter, which is on every device


def _named(size: tuple[int, int]) -> str:
    return f"{size[0]}_processes_of_{size[1]}"


@pytest.fixture(scope="module", params=GROUPS, ids=_named)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One job for all tests of a size: the folder of its results, and the number of ranks."""
    count, devices = request.param
    folder = tmp_path_factory.mktemp("ranks")
    with ranks([SCRIPT, folder], folder, count=count, devices=devices) as started:
        all_end_well(started)
    return folder, count


def of_rank(folder: Path, name: str, rank: int) -> list[np.ndarray]:
    with np.load(folder / f"{name}-{rank}.npz") as found:
        return [found[key] for key in found]


def assert_alike(found: Sequence[np.ndarray], tree: Any, where: str) -> None:
    """Fails unless arrays are equal, up to the order of float32 sums for floats.

    More devices, and more processes, sum in another order; see `FLOAT32`.
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


def test_ranks_leave_out_a_step_whose_gradient_is_not_finite(trained: Trained) -> None:
    folder, count = trained
    wanted = toys.plain(STEPS, toys.rows(ROWS))
    for rank in range(count):
        assert_alike(of_rank(folder, "left out", rank), wanted, f"rank {rank}")


def test_what_rank_0_saves_all_restore(trained: Trained) -> None:
    folder, count = trained
    wanted = toys.plain(STEPS, toys.rows(ROWS))
    for rank in range(count):
        assert_alike(of_rank(folder, "saved", rank), wanted, f"rank {rank}")


def assert_near(found: Sequence[np.ndarray], tree: Any, where: str) -> None:
    """Fails unless arrays are equal within `models.ALLOWED`."""
    for x, y in zip(found, leaves(tree), strict=True):
        np.testing.assert_allclose(x, y, rtol=models.ALLOWED, atol=models.ALLOWED, err_msg=where)


def one_device(optimizer: str) -> Any:
    """Returns parameters and metrics of one device with the whole batch."""
    tx = models.OPTIMIZERS[optimizer]()
    step, state, metrics = jax.jit(models.training(tx)), models.start(tx), None
    for number in range(STEPS):
        state, metrics = step(state, models.batch(number))
    return state.params, metrics


def averaging(optimizer: str, workers: int, k_steps: int) -> Any:
    """Returns parameters and metrics of workers that average every `k_steps`, by the oracle."""
    oracle = AveragingOracle(models.OPTIMIZERS[optimizer](), workers, k_steps)
    loss = 0.0
    for number in range(STEPS):
        loss = oracle(models.batch(number))
    return oracle.met, {"loss": loss}


def merged(optimizer: str) -> Any:
    """Returns parameters and metrics with gradient accumulation, by optax on one device."""
    oracle = MergingOracle(models.OPTIMIZERS[optimizer]())
    state, metrics = models.start(optax.identity()), {"loss": 0.0}
    for number in range(STEPS):
        state, metrics = oracle(number)
    return state.params, {"loss": metrics["loss"]}


@pytest.mark.parametrize("name", WAYS)
def test_ranks_go_together_in_every_way(trained: Trained, name: str) -> None:
    folder, count = trained
    optimizer, options = WAYS[name]
    total = int((folder / "devices").read_text())
    if options.get("hierarchical", 1) >= total:
        return  # two devices have only one level
    if "communication" in options:
        wanted = averaging(optimizer, total, options["k_steps"])
    else:
        wanted = merged(optimizer) if "merge" in options else one_device(optimizer)
    for rank in range(count):
        *found, sizes = of_rank(folder, name, rank)
        assert_near(found, wanted, f"{name}, rank {rank}")
        if name == "sharded":
            here, whole = sizes
            share = total // count
            assert here <= whole * share / total + share * SMALL


def test_ranks_read_one_checkpoint_to_the_bit(trained: Trained) -> None:
    folder, count = trained
    for name in WAYS:
        first = of_rank(folder, name, 0) if (folder / f"{name}-0.npz").exists() else []
        for rank in range(1, count if first else 0):
            for x, y in zip(of_rank(folder, name, rank), first, strict=True):
                assert x.tobytes() == y.tobytes(), f"{name}, rank {rank}"

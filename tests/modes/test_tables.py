"""Tables in the relaxed modes, against one trainer and one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.errors import StrategyError
from tests.sparse.models import OPTIMIZERS, VALUES, batch_of, run_dense, sparse_job

BATCHES = [batch_of(seed) for seed in range(6)]
KEYS = np.arange(VALUES)


def play(strategy: jf.DistributedStrategy, optimizer: str, trainers: int) -> Any:
    """Returns losses and rows of every trainer, and the tables of the job."""
    job = sparse_job(OPTIMIZERS[optimizer][0])

    def script(step: Any) -> Any:
        state, losses = jax.tree.map(jnp.copy, job.state), []
        for batch in BATCHES:
            state, loss = step(state, batch)
            losses.append(float(loss))
        last = step.pull(state)
        return last, (losses, step.look_up("users", KEYS).copy())

    example = (job.state, BATCHES[0])
    twin = jf.Twin(job.train_step, example, strategy, servers=2, trainers=trainers)
    return twin.play(script).metrics, run_dense(job.table, OPTIMIZERS[optimizer][1], BATCHES)


# Deltas of rows are sent and summed again, with some additional rounding.
@pytest.mark.parametrize(("how", "rtol"), [("async", 2e-6), ("geo", 2e-5)])
def test_one_trainer_is_one_device(how: Any, rtol: float) -> None:
    strategy = jf.DistributedStrategy(
        communication=how, k_steps=2 if how == "geo" else 1, min_block_size=2, staleness=4
    )
    ((losses, rows),), (wanted, dense_losses) = play(strategy, "sgd", 1)
    if how == "geo":  # async computes with the values of that moment
        np.testing.assert_allclose(losses, dense_losses, rtol=rtol)
        np.testing.assert_allclose(rows, wanted["users"], rtol=rtol, atol=rtol)
    assert np.isfinite(rows).all()
    assert not np.array_equal(rows, sparse_rows())


def sparse_rows() -> np.ndarray:
    return jf.tables.TableStore(sparse_job(OPTIMIZERS["sgd"][0]).table.spec).look_up(KEYS)


def test_averaging_states_of_tables_is_refused() -> None:
    strategy = jf.DistributedStrategy(communication="fl", k_steps=2, min_block_size=2)
    job = sparse_job(OPTIMIZERS["sgd"][0])
    twin = jf.Twin(job.train_step, (job.state, BATCHES[0]), strategy)
    with pytest.raises(StrategyError, match="tables are not trained with communication='fl'") as no:
        twin.programs()  # before any process starts
    assert "communication='geo'" in "\n".join(no.value.__notes__)

"""Tables in checkpoints of a step: training resumes in any mode."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.errors import CheckpointError
from tests.sparse.models import OPTIMIZERS, VALUES, Job, batch_of, sparse_job

BATCHES = [batch_of(seed) for seed in range(6)]


def trained(step: Any, state: Any, batches: Any) -> Any:
    for batch in batches:
        state, _ = step(state, batch)
    return state


def rows_of(step: Any) -> bytes:
    found: bytes = step.tables.look_up("users", np.arange(VALUES)).tobytes()
    return found


def made(job: Job) -> Any:
    return jf.distribute(job.train_step, (job.state, BATCHES[0]), "single")


def test_training_goes_on_to_the_bit_where_a_checkpoint_was(tmp_path: Path) -> None:
    job = sparse_job(OPTIMIZERS["adagrad"][0])
    whole, half = made(job), made(job)
    trained(whole, jax.tree.map(jnp.copy, job.state), BATCHES)
    half.save(tmp_path / "half", trained(half, jax.tree.map(jnp.copy, job.state), BATCHES[:3]))
    other = made(job)
    trained(other, other.restore(tmp_path / "half"), BATCHES[3:])
    assert rows_of(other) == rows_of(whole)
    assert other.tables.step == whole.tables.step == 6


@pytest.mark.grid
def test_servers_go_on_from_what_one_process_saved(tmp_path: Path) -> None:
    job = sparse_job(OPTIMIZERS["adagrad"][0])
    alone = made(job)
    alone.save(tmp_path / "alone", trained(alone, jax.tree.map(jnp.copy, job.state), BATCHES[:3]))
    before = rows_of(alone)
    strategy = jf.DistributedStrategy(min_block_size=2)
    twin = jf.Twin(job.train_step, (job.state, BATCHES[0]), strategy, servers=2)

    def script(step: Any) -> Any:
        state = step.restore(tmp_path / "alone")
        found = rows_of(step)
        state = trained(step, state, BATCHES[3:])
        step.save(tmp_path / "job", state)
        return step.pull(state), (found, rows_of(step))

    (found, after), _ = twin.play(script).metrics
    assert found == before
    back = made(job)
    back.restore(tmp_path / "job")
    assert rows_of(back) == after != before


def test_a_checkpoint_without_the_table_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    job = sparse_job(jf.tables.Sgd())
    step = made(job)
    state = trained(step, jax.tree.map(jnp.copy, job.state), BATCHES)
    before = rows_of(step)
    arrays = {
        "params/users": np.zeros((), np.float32),
        "params/w": np.asarray(state["params"]["w"]),
    }
    jf.checkpoint.save_arrays(tmp_path / "bare", arrays, step=1)
    with pytest.raises(CheckpointError, match="has no table `users`"):
        step.restore(tmp_path / "bare")
    assert rows_of(step) == before

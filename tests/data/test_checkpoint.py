"""A job of another size goes on from a checkpoint with the same samples."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.data import Loader
from jaxfleet.errors import CheckpointError, FeedError
from jaxfleet.runtime import TrainerStep

STEPS, SAVED_AT = 6, 2
RANDOM = np.random.default_rng(0)
SOURCE = {"x": RANDOM.normal(size=(40, 5)).astype(np.float32), "n": np.arange(40, dtype=np.int32)}


def loader(part: int, of: int) -> Loader:
    if of == 1:
        return Loader(SOURCE, 8, epochs=2, seed=4)
    return Loader(SOURCE, 8, epochs=2, seed=4, batch="local", part=(part, of))


def start() -> Any:
    return {"w": jnp.ones(5), "opt": jf.distributed_optimizer(optax.adam(0.1)).init(jnp.ones(5))}


def train_step(state: Any, batch: Any) -> Any:
    tx = jf.distributed_optimizer(optax.adam(0.1))
    loss, grads = jax.value_and_grad(lambda w: ((batch["x"] @ w - batch["n"]) ** 2).mean())(
        state["w"]
    )
    updates, opt = tx.update(grads, state["opt"], state["w"])
    return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, loss


def job(trainers: int, script: Any) -> Any:
    """Returns what a script returns on each trainer."""
    strategy = jf.DistributedStrategy(mode="pserver", batch="local")
    example = (start(), loader(0, trainers)[0])
    return jf.Twin(train_step, example, strategy, trainers=trainers).play(script).states


def alone() -> Any:
    example = (start(), loader(0, 1)[0])
    step = jf.distribute(train_step, example=example, strategy="single")
    assert isinstance(step, jf.Step)
    return step


def save_after(steps: int, path: Path) -> Any:
    def script(step: TrainerStep) -> Any:
        state, batches = start(), iter(loader(step.client.me.trainer, 2))
        for _ in range(steps):
            state, _ = step(state, next(batches))
        step.save(path, state, data=batches.state())
        batches.close()
        return None, ()

    return script


@pytest.mark.grid
@pytest.mark.parametrize("trainers", [1, 4])
def test_a_job_of_another_size_reads_what_was_left(trainers: int, tmp_path: Path) -> None:
    job(2, save_after(SAVED_AT, tmp_path / "c"))
    numbers: dict[int, list[list[int]]] = {}

    def go_on(step: TrainerStep) -> Any:
        me = step.client.me.trainer
        state, done = step.resume(step.restore(tmp_path / "c"))
        assert loader(me, trainers).from_checkpoint(tmp_path / "c").step == done == SAVED_AT
        for batch in loader(me, trainers).from_checkpoint(tmp_path / "c"):
            numbers.setdefault(me, []).append(batch["n"].tolist())
            state, _ = step(state, batch)
        return step.pull(state)["w"], ()

    ends = job(trainers, go_on)
    whole, step, state = loader(0, 1), alone(), start()
    left = [
        np.concatenate(parts).tolist()
        for parts in zip(*(numbers[me] for me in range(trainers)), strict=True)
    ]
    assert left == [whole[n]["n"].tolist() for n in range(SAVED_AT, len(whole))]
    for batch in whole:
        state, _ = step(state, batch)
    np.testing.assert_allclose(ends[0], state["w"], rtol=1e-5)  # sums in another order


def test_one_device_saves_a_position_and_other_options_refuse_it(tmp_path: Path) -> None:
    step, batches = alone(), iter(loader(0, 1))
    state, _ = step(start(), next(batches))
    step.save(tmp_path / "c", state, data=batches.state())
    assert loader(0, 1).from_checkpoint(tmp_path / "c").step == 1
    with pytest.raises(FeedError, match="saved with batch_size=8, and this loader has"):
        Loader(SOURCE, 4, seed=4).from_checkpoint(tmp_path / "c")


def test_a_checkpoint_without_a_position_names_what_to_do(tmp_path: Path) -> None:
    step = alone()
    step.save(tmp_path / "c", start(), number=3)
    message = "the checkpoint of step 3 at .* has no position of a loader"
    with pytest.raises(CheckpointError, match=message) as caught:
        loader(0, 1).from_checkpoint(tmp_path / "c")
    assert "from_step(step)" in str(caught.value.hint)

"""Every push of several trainers to a table counts once, in every mode."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from tests.modes.linear import CACHE

VALUES, TRAINERS = 50, 4
table = jf.embedding_table(
    "words", 2, initializer=jf.tables.Constant(0.0), optimizer=jf.tables.Sgd(1.0)
)
tx = jf.distributed_optimizer(optax.sgd(1.0))


def train_step(state: Any, batch: Any) -> Any:
    """Subtracts 1 from a row for each occurrence of its key."""

    def loss_of(params: Any) -> Any:
        return table(params["words"], batch["keys"]).sum()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def rows_after(batches: list[Any], **options: Any) -> tuple[np.ndarray, ...]:
    """Returns the rows that each trainer sees at the end."""
    params = {"words": table.init()}
    state = {"params": params, "opt": tx.init(params)}
    strategy = jf.DistributedStrategy(mode="pserver", **options)
    twin = jf.Twin(
        train_step, (state, batches[0]), strategy, servers=2, trainers=TRAINERS, cache=CACHE
    )

    def script(step: Any) -> Any:
        now = jax.tree.map(jnp.copy, state)
        for batch in batches:
            now, _ = step(now, batch)
        now = step.pull(now)
        return now, (step.look_up("words", np.arange(VALUES))[:, 0].copy(),)

    return tuple(metrics[0] for metrics in twin.play(script).metrics)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"communication": "async"},
        {"communication": "async", "staleness": 0},
        {"communication": "half_async"},
        {"communication": "dc_asgd", "delay_compensation": 0.0},  # corrections are not counts
    ],
)
def test_no_push_is_lost_and_none_counts_twice(options: Any) -> None:
    draw = np.random.default_rng(0)
    batches = [{"keys": draw.integers(0, VALUES, (16, 5))} for _ in range(8)]
    times = np.bincount(np.concatenate([b["keys"].ravel() for b in batches]), minlength=VALUES)
    last = min(rows_after(batches, **options), key=np.sum)  # the trainer with the last lookup
    np.testing.assert_array_equal(last, -times)


def test_half_async_applies_the_mean_of_as_many_pushes_as_it_merges() -> None:
    draw = np.random.default_rng(0)
    batches = [{"keys": draw.integers(0, VALUES, (16, 5))} for _ in range(7)]
    times = [np.bincount(b["keys"].ravel(), minlength=VALUES) for b in batches]
    # Three and three, and the last alone, since pending pushes are sent before a pull.
    wanted = -(np.sum(times[:6], axis=0) / 3.0 + times[6])
    last = min(rows_after(batches, communication="half_async", merge=3), key=np.sum)
    np.testing.assert_allclose(last, wanted, rtol=1e-6)


def test_an_exchange_takes_a_share_of_what_each_did_and_the_rest_with_the_next() -> None:
    keys = np.repeat(np.arange(TRAINERS), 2)[:, None]  # each trainer has its own key
    batches = [{"keys": keys}] * 4  # 2 per step
    (found, *_) = rows_after(batches, communication="geo", k_steps=2)
    # d = 4 / 4 = 1, and then the remaining 3 and 4 more: 7 / 4.
    np.testing.assert_allclose(found[:TRAINERS], -2.75, rtol=1e-6)

"""A learning rate that a step computes from its batch: trainer 0 sends it, before results of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from tests.mistakes.common import loss, params

BATCHES = [
    {"x": np.full((8, 4), n, np.float32), "y": np.ones((8, 2), np.float32)} for n in (1, 2, 3)
]


def pserver(min_block_size: int) -> jf.DistributedStrategy:
    return jf.DistributedStrategy(mode="pserver", min_block_size=min_block_size, max_imbalance=0)


def rated(tx: Any, value: jax.Array, grads: Any, state: Any) -> tuple[Any, Any]:
    """Returns an optimizer's updates, at a rate that depends on a loss."""
    opt = state["opt"]._replace(hyperparams={"learning_rate": 0.1 / (1 + jnp.square(value))})
    return tx.update(grads, opt, state["params"])


@pytest.mark.parametrize("min_block_size", [1, 8192])
def test_a_metric_of_an_update_comes_after_the_rate_that_was_sent_for_it(
    min_block_size: int,
) -> None:
    tx = jf.distributed_optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = rated(tx, value, grads, state)
        moved = sum(jnp.square(x).sum() for x in jax.tree.leaves(updates))
        metrics = {"loss": value, "moved": moved}
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, metrics

    state = {"params": params(), "opt": tx.init(params())}
    found = jf.verify(step, state, BATCHES, strategy=pserver(min_block_size))
    assert found.same_on_all
    assert found.largest < 1e-5


def test_trainers_update_where_a_later_loss_depends_on_what_such_a_rate_updates() -> None:
    tx = jf.distributed_optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    critic_tx = jf.distributed_optimizer(optax.sgd(0.1))

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = rated(tx, value, grads, state)
        new: Any = optax.apply_updates(state["params"], updates)

        def critic_loss(critic: jax.Array) -> jax.Array:
            return jnp.square(critic - new["w"].mean()).sum() + loss(new, batch)

        value, grads = jax.value_and_grad(critic_loss)(state["critic"])
        updates, critic_opt = critic_tx.update(grads, state["critic_opt"], state["critic"])
        critic = optax.apply_updates(state["critic"], updates)
        after = {"params": new, "opt": opt, "critic": critic, "critic_opt": critic_opt}
        return after, {"loss": value}

    critic = jnp.ones((3, 2))
    state = {"params": params(), "opt": tx.init(params())}
    state |= {"critic": critic, "critic_opt": critic_tx.init(critic)}
    found = jf.verify(step, state, BATCHES, strategy=pserver(1))
    assert found.same_on_all
    assert found.largest < 1e-5


def test_a_rate_that_is_itself_a_sum_over_trainers_is_sent_complete() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.01))

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        rate = jnp.sum(batch["y"])
        updates = jax.tree.map(lambda leaf: leaf * rate, updates)
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    found = jf.verify(step, {"params": params(), "opt": tx.init(params())}, BATCHES, pserver(1))
    assert found.same_on_all
    assert found.largest < 1e-5

"""Rows that are looked up between steps: to evaluate a model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import FeedError

table = jf.embedding_table("words", 2, optimizer=jf.tables.Sgd(0.5))
tx = jf.distributed_optimizer(optax.sgd(0.5))


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    def loss_of(params: Any) -> jax.Array:
        return (table(params["words"], batch["ids"]) * batch["x"][:, None]).sum()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def test_they_are_as_the_last_step_left_them_in_any_shape() -> None:
    params = {"words": table.init()}
    state = {"params": params, "opt": tx.init(params)}
    ids = np.array([2**62, -5, 2**62])
    batch = {"ids": ids, "x": np.ones(3, np.float32)}
    step = jf.distribute(train_step, example=(state, batch), strategy="single")
    assert isinstance(step, jf.Step)
    before = step.look_up("words", [[-5, 2**62], [7, 7]])
    assert before.shape == (2, 2, 2)
    np.testing.assert_array_equal(before[1, 0], before[1, 1])
    step(state, batch)
    after = step.look_up("words", [[-5, 2**62], [7, 7]])
    moved = np.array([[0.5, 1.0], [0.0, 0.0]], np.float32)[..., None]  # -5 once, 2**62 twice
    np.testing.assert_array_equal(after, before - moved)
    assert step.look_up("words", np.empty((0, 3), np.int64)).shape == (0, 3, 2)


def test_what_is_no_key_is_refused() -> None:
    params = {"words": table.init()}
    state = {"params": params, "opt": tx.init(params)}
    batch = {"ids": np.zeros(3, np.int64), "x": jnp.ones(3)}
    step = jf.distribute(train_step, example=(state, batch), strategy="single")
    assert isinstance(step, jf.Step)
    with pytest.raises(FeedError, match="keys of table 'words'"):
        step.look_up("words", [1.5])

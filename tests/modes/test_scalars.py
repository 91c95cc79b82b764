"""Scalar parameters, which numpy turns into numbers instead of arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from tests.modes.linear import CACHE, batch

tx = jf.distributed_optimizer(optax.sgd(0.1))


def train_step(state: Any, data: Any) -> Any:
    def loss(bias: Any) -> Any:
        return jnp.square(bias - 1.0 + 0.0 * data["y"]).mean()

    value, grad = jax.value_and_grad(loss)(state["bias"])
    updates, opt = tx.update(grad, state["opt"], state["bias"])
    return {"bias": optax.apply_updates(state["bias"], updates), "opt": opt}, value


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["sync", "async", "half_async", "dc_asgd", "geo", "fl"])
def test_they_are_merged_and_sent_in_every_mode(how: Any) -> None:
    strategy = jf.DistributedStrategy(communication=how, merge=3, k_steps=3, staleness=6)
    state = {"bias": jnp.zeros(()), "opt": tx.init(jnp.zeros(()))}
    twin = jf.Twin(train_step, (state, batch(0)), strategy, servers=1, trainers=2, cache=CACHE)
    found = twin.run(state, [batch(n) for n in range(30)]).states[0]["bias"]
    assert found.shape == ()
    assert 0.5 < float(np.asarray(found)) < 1.2

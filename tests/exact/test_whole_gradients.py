"""Gradients that a sum over rows does not complete: trainer 0 sends them for all."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf

ROWS, STEPS = 8, 3


def once(x: jax.Array) -> jax.Array:
    """Returns a value of one sum over all trainers, with a nonlinear function after it."""
    return jnp.square(x.mean())


def twice(x: jax.Array) -> jax.Array:
    """Likewise with two consecutive sums."""
    return jnp.tanh(jnp.square(x - x.mean()).mean())


@pytest.mark.few(2)
@pytest.mark.parametrize("scale", [once, twice])
@pytest.mark.parametrize("min_block_size", [1, 8192])
def test_trainers_that_send_no_gradient_get_the_parameters(scale: Any, min_block_size: int) -> None:
    tx = jf.distributed_optimizer(optax.adam(0.01))

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return scale(batch["x"]) * jnp.square(params["w"]).sum()

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    params = {"w": jnp.arange(1.0, 13.0).reshape(4, 3)}
    draw = np.random.default_rng(0)
    batches = [{"x": draw.normal(size=(ROWS, 4)).astype(np.float32)} for _ in range(STEPS)]
    found = jf.verify(
        step,
        {"params": params, "opt": tx.init(params)},
        batches,
        strategy=jf.DistributedStrategy(
            mode="pserver", min_block_size=min_block_size, max_imbalance=0
        ),
        servers=3,
        trainers=2,
    )
    assert found.same_on_all
    assert found.largest < 1e-6

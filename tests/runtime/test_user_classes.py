"""User-defined classes in the state, and their effect on leaves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from tests.gallery.scales import LossScale


def scaled(tx: Any) -> tuple[Any, Any]:
    """Returns a step whose loss is scaled by such a class, and its initial state."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        scale = state["scale"].scale

        def loss(params: Any) -> jax.Array:
            return jnp.square(batch["x"] @ params).mean() * scale

        value, grad = jax.value_and_grad(loss)(state["params"])
        updates, opt = tx.update(grad / scale, state["opt"], state["params"])
        new = optax.apply_updates(state["params"], updates)
        after = LossScale(scale * 2, state["scale"].counter + 1)
        return {"params": new, "opt": opt, "scale": after}, value / scale

    params = jnp.arange(1.0, 5.0)
    scale = LossScale(jnp.float32(8.0), jnp.int32(0))
    return step, {"params": params, "opt": tx.init(params), "scale": scale}


BATCH = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}


@pytest.mark.grid
def test_a_class_that_makes_arrays_of_its_leaves_may_be_in_the_state() -> None:
    step, state = scaled(jf.distributed_optimizer(optax.sgd(0.1)))
    trained: Any = jf.distribute(
        step, (state, BATCH), jf.DistributedStrategy(devices=2, donate=False)
    )
    found, _ = trained(state, BATCH)
    expected, _ = step(state, BATCH)
    np.testing.assert_allclose(found["params"], expected["params"], rtol=1e-6)
    assert float(found["scale"].scale) == 16.0
    assert trained.compiled(state, BATCH)[0]["scale"].counter == 1
    assert trained.memory_analysis() is not None


def test_such_a_class_trains_over_servers() -> None:
    step, state = scaled(jf.distributed_optimizer(optax.sgd(0.1)))
    assert jf.verify(step, state, [BATCH, BATCH]).largest < 1e-6

"""Optax's optimizers over servers: each makes parameters interact differently."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.runtime.verification import Verification

ROWS, FEATURES, HIDDEN, CLASSES = 8, 3, 4, 2
CONTRIB: Any = optax.contrib  # mypy does not see its names
STRATEGY = jf.DistributedStrategy(min_block_size=4, max_imbalance=0)


def params() -> dict[str, jax.Array]:
    draw = np.random.default_rng(0)
    w = draw.normal(size=(FEATURES, HIDDEN)).astype(np.float32)
    v = draw.normal(size=(HIDDEN, CLASSES)).astype(np.float32)
    return {"b": jnp.full(HIDDEN, 0.1), "v": jnp.asarray(v), "w": jnp.asarray(w)}


def batches(count: int = 2) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(1)
    return [
        {
            "x": draw.normal(size=(ROWS, FEATURES)).astype(np.float32),
            "y": draw.integers(0, CLASSES, size=ROWS),
        }
        for _ in range(count)
    ]


def loss(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["v"], batch["y"]).mean()


Extra = Callable[[Any, Any, Any, Any], dict[str, Any]]
"""What `update` gets besides: of the loss, the gradients, the parameters and the batch."""


def nothing(value: Any, grads: Any, params: Any, batch: Any) -> dict[str, Any]:
    del value, grads, params, batch
    return {}


def the_loss(value: Any, grads: Any, params: Any, batch: Any) -> dict[str, Any]:
    del grads, params, batch
    return {"value": value}


def step_with(tx: Any, extra: Extra) -> Callable[[Any, Any], tuple[Any, Any]]:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        more = extra(value, grads, state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"], **more)
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step


def verified(optimizer: Any, extra: Extra = nothing) -> Verification:
    tx = jf.distributed_optimizer(optimizer)
    state = {"params": params(), "opt": tx.init(params())}
    return jf.verify(step_with(tx, extra), state, batches(), STRATEGY, servers=2, trainers=2)


def test_a_norm_over_parameters_may_be_of_what_the_optimizer_made_of_gradients() -> None:
    found = verified(optax.chain(optax.scale(0.5), optax.clip_by_global_norm(0.5)))
    assert found.same_on_all
    assert found.largest < 1e-5


NORMS = {
    "clipped after decay": (
        optax.chain(optax.add_decayed_weights(0.1), optax.clip_by_global_norm(0.5)),
        nothing,
    ),
    "adam, clipped": (
        optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(0.01)),
        nothing,
    ),
    "adam, clipped, every second step": (
        optax.MultiSteps(optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(0.01)), 2),
        nothing,
    ),
    "polyak_sgd": (optax.polyak_sgd(0.1), the_loss),
    "momo_adam": (CONTRIB.momo_adam(0.1), the_loss),
    "lbfgs without a search": (optax.lbfgs(0.1, memory_size=2, linesearch=None), nothing),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_what_adam_and_its_kin_made_come_together_on_servers(name: str) -> None:
    found = verified(*NORMS[name])
    assert found.same_on_all
    assert found.largest < 1e-5

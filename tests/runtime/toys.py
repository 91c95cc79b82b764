"""A small training step for the tests of Step, and its distribution."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfleet as jf

FEATURES = 6
State = dict[str, Any]
TrainStep = Callable[[State, Any], tuple[State, Any]]


def rows(count: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.tanh(x.sum(axis=1))}


def start(tx: optax.GradientTransformation) -> State:
    params = {"w": jnp.linspace(-0.5, 0.5, FEATURES), "b": jnp.zeros(())}
    return {"params": params, "opt": tx.init(params)}


def training(tx: optax.GradientTransformation) -> TrainStep:
    """Returns a step whose metrics are a loss, and each row's error."""

    def train_step(state: State, batch: Any) -> tuple[State, Any]:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            errors = batch["x"] @ params["w"] + params["b"] - batch["y"]
            return jnp.square(errors).mean(), errors

        (value, errors), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {**state, "params": params, "opt": opt}, {"loss": value, "errors": errors}

    return train_step


def distributed(
    strategy: jf.DistributedStrategy | str | None = None, *, devices: int = 4
) -> tuple[jf.Step, State]:
    tx = jf.distributed_optimizer(optax.adam(0.1))
    chosen = jf.DistributedStrategy(devices=devices) if strategy is None else strategy
    step = jf.distribute(training(tx), (start(tx), rows(8)), chosen)
    assert isinstance(step, jf.Step)
    return step, start(tx)


def plain(steps: int, batch: Any) -> tuple[State, Any]:
    """Returns the result of the same steps on one device, each on the same batch."""
    tx = optax.adam(0.1)
    train_step, state, metrics = jax.jit(training(tx)), start(tx), None
    for _ in range(steps):
        state, metrics = train_step(state, batch)
    return state, metrics


def assert_alike(found: Any, wanted: Any) -> None:
    """Fails unless two trees are equal up to the order of float32 sums."""
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves_with_path(wanted), strict=True)
    for (path, x), (wanted_path, y) in pairs:
        assert path == wanted_path
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-6, atol=2e-6)

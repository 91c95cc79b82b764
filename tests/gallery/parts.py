"""What the programs of the gallery share: a small net, its losses, an update."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.data import CLASSES, FEATURES
from tests.zoo.layers import init_mlp, mlp

State = dict[str, Any]
HIDDEN = 6


def net(seed: int = 1, outputs: int = CLASSES) -> Any:
    """Makes the parameters of a net with one hidden layer."""
    return init_mlp(seed, (FEATURES, HIDDEN, outputs))


def cross_entropy(params: Any, batch: Any) -> jax.Array:
    """Returns the mean loss of a net that classifies."""
    scores = mlp(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean()


def started(tx: Any, params: Any, **more: Any) -> State:
    """Returns the state that a program begins with."""
    return {"params": params, "opt": tx.init(params), **more}


def updated(tx: Any, state: State, grads: Any, **extra: Any) -> State:
    """Returns the state after one update, its other entries as they were."""
    updates, opt = tx.update(grads, state["opt"], state["params"], **extra)
    return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}


def averaged(old: Any, new: Any, weight: float | jax.Array = 0.1) -> Any:
    """Returns an exponential moving average of parameters, one step on."""
    return jax.tree.map(lambda x, y: (1 - weight) * x + weight * y, old, new)


def unit(x: jax.Array) -> jax.Array:
    """Returns rows divided by their norms."""
    return x / jnp.sqrt(jnp.square(x).sum(axis=-1, keepdims=True) + 1e-6)

"""Common parts of the gallery's programs: a small net, its losses, an update."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo import Built
from tests.zoo.data import CLASSES, FEATURES
from tests.zoo.layers import init_mlp, mlp

State = dict[str, Any]
HIDDEN = 6


@dataclass(frozen=True)
class Spread(Built):
    """A step of several arguments, as in many public programs.

    `train_step(*state, *batch(step, rows))` returns `(*metrics, *state)` with `before` metrics
    in front of the state, and further ones after it. State and batch are tuples of arguments.
    """

    train_step: Callable[..., Any]
    before: int = 0


def arguments(built: Built, state: Any, batch: Any) -> tuple[Any, ...]:
    return (*state, *batch) if isinstance(built, Spread) else (state, batch)


def state_of(built: Built, results: Any) -> Any:
    if not isinstance(built, Spread):
        return results[0]
    return tuple(results[built.before : built.before + len(built.state)])


def net(seed: int = 1, outputs: int = CLASSES) -> Any:
    """Makes the parameters of a net with one hidden layer."""
    return init_mlp(seed, (FEATURES, HIDDEN, outputs))


def cross_entropy(params: Any, batch: Any) -> jax.Array:
    """Returns the mean loss of a net that classifies."""
    scores = mlp(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean()


def started(tx: Any, params: Any, **more: Any) -> State:
    """Returns a program's initial state."""
    return {"params": params, "opt": tx.init(params), **more}


def updated(tx: Any, state: State, grads: Any, **extra: Any) -> State:
    """Returns the state after one update, with other entries unchanged."""
    updates, opt = tx.update(grads, state["opt"], state["params"], **extra)
    return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}


def averaged(old: Any, new: Any, weight: float | jax.Array = 0.1) -> Any:
    """Returns an exponential moving average of parameters, one step on."""
    return jax.tree.map(lambda x, y: (1 - weight) * x + weight * y, old, new)


def unit(x: Any) -> jax.Array:
    """Returns rows divided by their norms."""
    return x / jnp.sqrt(jnp.square(x).sum(axis=-1, keepdims=True) + 1e-6)

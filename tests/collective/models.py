"""A small training step with several optimizers, for the tests of collective strategies."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfleet as jf

ROWS = 16
STEPS = 8  # devices average twice, at intervals of 3 or 4
SIZES = (6, 8, 4)
# Sums over rows and over devices have another order on several devices: ULPs (6e-8) per step for
# values near 1, amplified by Adam's division by a small root.
ALLOWED = 1e-5

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.02),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.02)),
}

Params = dict[str, Any]
Batch = tuple[Any, Any]


class State(NamedTuple):
    params: Params
    opt: Any


def start(tx: optax.GradientTransformation) -> State:
    rng = np.random.default_rng(0)
    wide, mid, out = SIZES
    params = {
        "w1": jnp.asarray(rng.normal(size=(wide, mid)) / 2, jnp.float32),
        "b1": jnp.zeros(mid),
        "w2": jnp.asarray(rng.normal(size=(mid, out)) / 2, jnp.float32),
    }
    return State(params, tx.init(params))


def batch(number: int, rows: int = ROWS) -> Batch:
    rng = np.random.default_rng(100 + number)
    x = rng.normal(size=(rows, SIZES[0])).astype(np.float32)
    return x, np.tanh(x[:, : SIZES[2]] - x[:, 1 : SIZES[2] + 1])


def loss(params: Params, data: Batch) -> jax.Array:
    """Returns the mean square error."""
    x, y = data
    h = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean(jnp.square(h @ params["w2"] - y))


def training(tx: optax.GradientTransformation) -> Callable[[State, Batch], tuple[State, Any]]:
    def train_step(state: State, data: Batch) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state.params, data)
        updates, opt = tx.update(grads, state.opt, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return State(params, opt), {"loss": value}

    return train_step


def distributed(name: str, strategy: jf.DistributedStrategy) -> tuple[jf.Step, State]:
    tx = OPTIMIZERS[name]()
    wrapped = jf.distributed_optimizer(tx)
    step = jf.distribute(training(wrapped), (start(tx), batch(0)), strategy)
    assert isinstance(step, jf.Step)
    return step, start(tx)


def assert_close(found: Any, wanted: Any, where: str = "", allowed: float = ALLOWED) -> None:
    """Fails unless two trees are nearly equal."""
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, x), y in pairs:
        text = f"{jax.tree_util.keystr(path)} {where}"
        np.testing.assert_allclose(x, y, rtol=allowed, atol=allowed, err_msg=text)

"""Draws training steps of jax functions: loops, branches, random masks, slices and joins."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxfleet as jf

WIDTH, ROWS = 4, 6
Layer = Callable[[Any, Any, Any], Any]


def _scanned(h: Any, w: Any, _: Any) -> Any:
    return lax.scan(lambda c, _: (jnp.tanh(c * w[0]), None), h, None, length=3)[0]


def _looped(h: Any, _: Any, __: Any) -> Any:
    def turn(held: Any) -> Any:
        return held[0] + 1, jnp.sin(jnp.cos(held[1]))

    return h + lax.while_loop(lambda held: held[0] < 3, turn, (0, lax.stop_gradient(h)))[1]


def _branched(h: Any, w: Any, _: Any) -> Any:
    return lax.cond(w[0, 0] > 0, lambda x: jnp.tanh(jnp.sin(x)), lambda x: 2 * x, h)


def _masked(h: Any, _: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h, 0.0)


def _narrow(h: Any, w: Any, _: Any) -> Any:
    left = jnp.tanh(h[:, :2] * w[0, :2])
    return jnp.concatenate([left, jnp.sin(left)], axis=1)


LAYERS: dict[str, Layer] = {
    "product": lambda h, w, _: jnp.tanh(h @ w),
    "residual": lambda h, w, _: h + jnp.sin(h @ w),
    "two ways": lambda h, w, _: jnp.tanh(h @ w) * jnp.cos(h),
    "centred": lambda h, w, _: (h - h.mean(0)) * w[0],
    "scanned": _scanned,
    "looped": _looped,
    "branched": _branched,
    "masked": _masked,
    "narrow": _narrow,
}


def drawn_step(drawn: random.Random) -> tuple[Any, tuple[Any, Any]]:
    """Returns a training step of a few drawn layers, and its example."""
    names = [drawn.choice(list(LAYERS)) for _ in range(drawn.randint(2, 6))]
    makes: Any = drawn.choice([optax.sgd, optax.adam])
    tx: Any = jf.distributed_optimizer(makes(0.1))
    fetches_hidden = drawn.random() < 0.5

    def loss_of(params: Any, batch: Any, key: Any) -> Any:
        h = batch["x"]
        for number, (name, w) in enumerate(zip(names, params, strict=True)):
            h = LAYERS[name](h, w, jax.random.fold_in(key, number))
        return jnp.mean((h - batch["y"]) ** 2), h

    def train_step(state: Any, batch: Any) -> Any:
        params, held, key = state
        key, mine = jax.random.split(key)
        graded = jax.value_and_grad(loss_of, has_aux=True)
        (loss, h), grads = graded(params, batch, mine)
        updates, held = tx.update(grads, held, params)
        metrics = {"loss": loss, **({"mean": h.mean()} if fetches_hidden else {})}
        return (optax.apply_updates(params, updates), held, key), metrics

    rng = np.random.default_rng(drawn.randint(0, 1000))
    params = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in names]
    batch = {name: rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in "xy"}
    return train_step, ((params, tx.init(params), jax.random.key(3)), batch)

"""Random numbers drawn in the step from a key in the state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tests.zoo.base import Built, Wrap, case, updated
from tests.zoo.data import CLASSES, FEATURES, bare, labelled
from tests.zoo.layers import Dense, dense, init_dense, init_flax, init_mlp, mlp, row_losses


class Dropped(nn.Module):
    """Two dense layers with dropout before and between them."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dropout(0.1, deterministic=False)(x)
        x = nn.relu(nn.Dense(16)(x))
        x = nn.Dropout(0.5, deterministic=False)(x)
        return nn.Dense(CLASSES)(x)


def build_dropout(wrap: Wrap) -> Built:
    """Builds linen dropout; the state's key is split every step."""
    model, tx = Dropped(), wrap(optax.adam(1e-2))
    params = init_flax(model, labelled(0, 2)["x"])["params"]

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        key, now = jax.random.split(state["key"])

        def loss(params: Any) -> jax.Array:
            logits = model.apply({"params": params}, batch["x"], rngs={"dropout": now})
            return row_losses(jnp.asarray(logits), batch["y"]).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return updated(tx, {**state, "key": key}, grads), {"loss": value}

    state = {"params": params, "opt_state": tx.init(params), "key": jax.random.key(5)}
    return Built(state, train_step, labelled)


def build_variational(wrap: Wrap) -> Built:
    """Builds a variational autoencoder: normal noise, an old-style key folded with the step."""
    tx = wrap(optax.adam(3e-3))
    params = {"encode": init_mlp(6, (FEATURES, 16, 8)), "decode": init_mlp(7, (4, 16, FEATURES))}

    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        mean, log_std = jnp.split(mlp(params["encode"], x), 2, axis=-1)
        latent = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
        error = jnp.square(mlp(params["decode"], latent) - x).sum(axis=-1)
        penalty = 0.5 * (jnp.square(mean) + jnp.exp(2 * log_std) - 2 * log_std - 1).sum(axis=-1)
        return jnp.mean(error + penalty)

    def train_step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        key = jax.random.fold_in(state["key"], state["step"])
        value, grads = jax.value_and_grad(loss)(state["params"], batch, key)
        return updated(tx, {**state, "step": state["step"] + 1}, grads), value

    state = {
        "params": params,
        "opt_state": tx.init(params),
        "key": jax.random.PRNGKey(6),
        "step": jnp.zeros((), jnp.int32),
    }
    return Built(state, train_step, bare(labelled, "x"))


def build_row_keys(wrap: Wrap) -> Built:
    """Builds dropout with a separate key for every row."""
    tx = wrap(optax.sgd(0.1))
    params = {"in": init_dense(27, FEATURES, 16), "out": init_dense(28, 16, CLASSES)}

    def row_logits(params: dict[str, Dense], x: jax.Array, key: jax.Array) -> jax.Array:
        hidden = jnp.tanh(dense(params["in"], x))
        kept = jax.random.bernoulli(key, 0.8, hidden.shape)
        return dense(params["out"], jnp.where(kept, hidden / 0.8, 0.0))

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        key, now = jax.random.split(state["key"])
        keys = jax.random.split(now, batch["x"].shape[0])

        def loss(params: Any) -> jax.Array:
            logits = jax.vmap(row_logits, in_axes=(None, 0, 0))(params, batch["x"], keys)
            return row_losses(logits, batch["y"]).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return updated(tx, {**state, "key": key}, grads), {"loss": value}

    state = {"params": params, "opt_state": tx.init(params), "key": jax.random.key(7)}
    return Built(state, train_step, labelled)


def noisy_program(
    wrap: Wrap, key: jax.Array, noise: Callable[[jax.Array, int], jax.Array]
) -> Built:
    """Builds a net whose hidden layer is multiplied by noise of shape [rows, 16]."""
    tx = wrap(optax.sgd(0.1))
    params = {"in": init_dense(29, FEATURES, 16), "out": init_dense(26, 16, CLASSES)}

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        key, now = jax.random.split(state["key"])
        factors = noise(now, batch["x"].shape[0])

        def loss(params: Any) -> jax.Array:
            hidden = factors * jnp.tanh(dense(params["in"], batch["x"]))
            return row_losses(dense(params["out"], hidden), batch["y"]).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return updated(tx, {**state, "key": key}, grads), {"loss": value}

    return Built({"params": params, "opt_state": tx.init(params), "key": key}, train_step, labelled)


def build_heads_first(wrap: Wrap) -> Built:
    """Builds noise drawn with the batch as its second axis: one number per head and row."""

    def noise(key: jax.Array, rows: int) -> jax.Array:
        heads = jax.random.uniform(key, (4, rows), minval=0.5, maxval=1.5)
        return jnp.repeat(heads, 4, axis=0).T

    return noisy_program(wrap, jax.random.key(8), noise)


def build_rbg(wrap: Wrap) -> Built:
    """Builds noise from the `rbg` generator, whose bits cannot be drawn row by row."""

    def noise(key: jax.Array, rows: int) -> jax.Array:
        return jax.random.bernoulli(key, 0.8, (rows, 16)) / 0.8

    return noisy_program(wrap, jax.random.key(9, impl="rbg"), noise)


CASES = (
    case("dropout", build_dropout, "core", "random"),
    case("variational", build_variational, "random"),
    case("row_keys", build_row_keys, "random", "device_keys"),
    case("heads_first", build_heads_first, "random", "device_keys"),
    case("rbg", build_rbg, "random", "device_keys"),
)

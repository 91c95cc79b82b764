"""Structures of batches and states: an array, a tuple, a dict of many types, trees with lists."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.zoo.base import Built, Wrap, case, plain_program
from tests.zoo.data import CLASSES, FEATURES, Array, Rows, bare, generator, labelled
from tests.zoo.layers import dense, init_dense, init_matrix, init_mlp, mlp, row_losses


def build_batch_array(wrap: Wrap) -> Built:
    """Builds an autoencoder: the batch is one array, the state a plain tuple."""
    tx = wrap(optax.adam(1e-2))
    params = init_mlp(60, (FEATURES, 6, FEATURES))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(mlp(params, x) - x))

    def train_step(state: tuple[Any, Any], x: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return Built((params, tx.init(params)), train_step, bare(labelled, "x"))


def pair(step: int, rows: int) -> tuple[Array, Array]:
    batch = labelled(step, rows)
    return batch["x"], batch["y"]


def build_batch_tuple(wrap: Wrap) -> Built:
    """Builds a step whose batch is a tuple and whose metrics are an empty dict."""
    tx = wrap(optax.sgd(0.1, momentum=0.9))
    params = init_mlp(61, (FEATURES, 16, CLASSES))

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return row_losses(mlp(params, x), y).mean()

    def train_step(state: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[Any, dict[str, Any]]:
        x, y = batch
        grads = jax.grad(loss)(state["params"], x, y)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {}

    return Built({"params": params, "opt_state": tx.init(params)}, train_step, pair)


def mixed_columns(step: int, rows: int) -> Rows:
    """Makes columns of many types, as in a table of customers."""
    random = generator(11, step)
    return {
        "amount": random.standard_normal((rows, FEATURES), dtype=np.float32),
        "country": random.integers(0, 7, rows, dtype=np.int8),
        "pixels": random.integers(0, 256, (rows, 4), dtype=np.uint8),
        "member": random.random(rows) < 0.5,
        "price": random.random(rows).astype(np.float16),
        "y": random.integers(0, CLASSES, rows).astype(np.int32),
    }


def build_batch_dict(wrap: Wrap) -> Built:
    """Builds a net over integer, boolean and half-precision columns."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        columns = [
            batch["amount"],
            params["country"][batch["country"]],
            batch["pixels"].astype(jnp.float32) / 255.0,
            jnp.where(batch["member"], 1.0, -1.0)[:, None],
            batch["price"].astype(jnp.float32)[:, None],
        ]
        logits = mlp(params["net"], jnp.concatenate(columns, axis=1))
        return row_losses(logits, batch["y"]).mean(), {"members": batch["member"].sum()}

    width = FEATURES + 3 + 4 + 1 + 1
    params = {"country": init_matrix(62, 7, 3), "net": init_mlp(63, (width, 16, CLASSES))}
    return plain_program(wrap(optax.adam(1e-2)), params, loss, mixed_columns)


def build_nested_params(wrap: Wrap) -> Built:
    """Builds parameters as nested lists, tuples and dicts, one of them a scalar."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        x = jnp.tanh(dense(params["in"], batch["x"]))
        for first, (second, gain) in params["blocks"]:
            x = x + gain * dense(second, jax.nn.relu(dense(first, x)))
        logits = dense(params["out"][0], x) * params["temperature"]
        return row_losses(logits, batch["y"]).mean(), {}

    def block(seed: int) -> list[Any]:
        return [init_dense(seed, 8, 8), (init_dense(seed + 1, 8, 8), jnp.full(8, 0.5, jnp.float32))]

    params = {
        "in": init_dense(64, FEATURES, 8),
        "blocks": [block(65), block(67)],
        "out": (init_dense(69, 8, CLASSES),),
        "temperature": jnp.ones(()),
    }
    return plain_program(wrap(optax.adam(1e-2)), params, loss, labelled)


CASES = (
    case("batch_array", build_batch_array),
    case("batch_tuple", build_batch_tuple),
    case("batch_dict", build_batch_dict, "int_metrics"),
    case("nested_params", build_nested_params),
)

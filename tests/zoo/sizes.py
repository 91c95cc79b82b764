"""Programs that inspect the batch size in Python, so that it cannot be a letter."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.base import Built, Wrap, case, plain_program, updated
from tests.zoo.data import CLASSES, FEATURES, labelled
from tests.zoo.layers import init_mlp, mlp, row_losses

MICROBATCHES = 4


def mean_loss(params: Any, batch: Any) -> jax.Array:
    return row_losses(mlp(params, batch["x"]), batch["y"]).mean()


def build_microbatches(wrap: Wrap) -> Built:
    """Builds gradients accumulated by a scan over four parts of the batch."""
    tx, params = wrap(optax.adam(1e-2)), init_mlp(70, (FEATURES, 16, CLASSES))

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        parts = jax.tree.map(lambda x: x.reshape(MICROBATCHES, -1, *x.shape[1:]), batch)

        def accumulate(total: Any, part: Any) -> tuple[Any, jax.Array]:
            value, grads = jax.value_and_grad(mean_loss)(state["params"], part)
            return jax.tree.map(jnp.add, total, grads), value

        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        total, values = jax.lax.scan(accumulate, zeros, parts)
        grads = jax.tree.map(lambda leaf: leaf / MICROBATCHES, total)
        return updated(tx, state, grads), {"loss": values.mean()}

    return Built({"params": params, "opt_state": tx.init(params)}, train_step, labelled)


def build_python_branch(wrap: Wrap) -> Built:
    """Builds a loss that a Python branch on the batch size scales."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        value = mean_loss(params, batch)
        if batch["x"].shape[0] % 2 == 0:
            value = 2.0 * value
        return value, {}

    params = init_mlp(71, (FEATURES, 16, CLASSES))
    return plain_program(wrap(optax.sgd(0.05)), params, loss, labelled)


def build_float_of_size(wrap: Wrap) -> Built:
    """Builds a mean that divides by the length as a Python float."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        losses = row_losses(mlp(params, batch["x"]), batch["y"])
        return losses.sum() / float(len(losses)), {}

    params = init_mlp(72, (FEATURES, 16, CLASSES))
    return plain_program(wrap(optax.sgd(0.1)), params, loss, labelled)


def build_permuted(wrap: Wrap) -> Built:
    """Builds mixup: each row is blended with a row chosen by a random permutation."""
    tx, params = wrap(optax.sgd(0.1)), init_mlp(73, (FEATURES, 16, CLASSES))

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        key, now = jax.random.split(state["key"])
        order = jax.random.permutation(now, batch["x"].shape[0])
        target = jax.nn.one_hot(batch["y"], CLASSES)
        x, target = (0.7 * part + 0.3 * part[order] for part in (batch["x"], target))

        def loss(params: Any) -> jax.Array:
            return optax.softmax_cross_entropy(mlp(params, x), target).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return updated(tx, {**state, "key": key}, grads), {"loss": value}

    state = {"params": params, "opt_state": tx.init(params), "key": jax.random.key(8)}
    return Built(state, train_step, labelled)


CASES = (
    case("microbatches", build_microbatches, "no_symbolic", rows=32),
    case("python_branch", build_python_branch, "size_branch"),
    case("float_of_size", build_float_of_size, "no_symbolic"),
    case("permuted", build_permuted, "no_symbolic", "crosses_rows", "random"),
)

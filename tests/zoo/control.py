"""Control flow around the batch: sums over it inside loops, branches and other functions."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.base import Built, Wrap, case, plain_program, updated
from tests.zoo.data import CLASSES, FEATURES, bare, labelled
from tests.zoo.layers import dense, init_dense, init_matrix, init_mlp, mlp, row_losses


def build_sinkhorn(wrap: Wrap) -> Built:
    """Builds balanced clustering: a loop normalises over the batch and the clusters alternately."""

    def balanced(scores: jax.Array) -> jax.Array:
        def once(_: int, weights: jax.Array) -> jax.Array:
            weights = weights / weights.sum(axis=0, keepdims=True)
            return weights / weights.sum(axis=1, keepdims=True)

        weights: jax.Array = jax.lax.fori_loop(0, 3, once, jnp.exp(scores / 0.5))
        return jax.lax.stop_gradient(weights)

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        scores = mlp(params["net"], x) @ params["centres"]
        targets = balanced(scores)
        value = optax.softmax_cross_entropy(scores, targets).mean()
        return value, {"sizes": targets.sum(axis=0)}

    params = {"net": init_mlp(90, (FEATURES, 16, 8)), "centres": init_matrix(91, 8, 4)}
    return plain_program(wrap(optax.sgd(0.05)), params, loss, bare(labelled, "x"))


def build_while_loop(wrap: Wrap) -> Built:
    """Builds targets that a `while_loop` sharpens until their mean confidence is high enough."""

    def sharpen(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        def unsure(carried: tuple[jax.Array, jax.Array]) -> jax.Array:
            sharpness, _ = carried
            return jax.nn.softmax(sharpness * logits).max(axis=-1).mean() < 0.6

        def sharper(carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            sharpness, rounds = carried
            return 1.3 * sharpness, rounds + 1

        start = (jnp.float32(1.0), jnp.int32(0))
        sharpness, rounds = jax.lax.while_loop(unsure, sharper, start)
        return jax.nn.softmax(sharpness * logits), rounds

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        logits = mlp(params, batch["x"])
        targets, rounds = sharpen(jax.lax.stop_gradient(logits))
        own = optax.softmax_cross_entropy(logits, targets).mean()
        return row_losses(logits, batch["y"]).mean() + 0.1 * own, {"rounds": rounds}

    params = init_mlp(92, (FEATURES, 16, CLASSES))
    return plain_program(wrap(optax.sgd(0.1)), params, loss, labelled)


def build_branch_on_loss(wrap: Wrap) -> Built:
    """Builds a step with a `cond` on the loss of the whole batch."""
    tx, params = wrap(optax.sgd(0.1)), init_mlp(93, (FEATURES, 16, CLASSES))

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        losses = row_losses(mlp(params, batch["x"]), batch["y"])
        value: jax.Array = jax.lax.cond(losses.mean() > 1.5, jnp.mean, _mean_square, losses)
        return value

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        value, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
        high = state["high"] + (value > 1.0)
        return updated(tx, {**state, "high": high}, grads), {"loss": value, "high": high}

    state = {"params": params, "opt_state": tx.init(params), "high": jnp.int32(0)}
    return Built(state, train_step, labelled)


def _mean_square(losses: jax.Array) -> jax.Array:
    return jnp.square(losses).mean()


def build_scanned_norm(wrap: Wrap) -> Built:
    """Builds layers in a scan, each normalised over the whole batch inside it."""
    layers = [init_dense(94 + i, 16, 16) for i in range(3)]

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, jax.Array]:
            y = dense(weights, x)
            spread = y.std(axis=0)
            return x + jnp.tanh((y - y.mean(axis=0)) / (spread + 1e-3)), spread

        x, spreads = jax.lax.scan(layer, dense(params["in"], batch["x"]), params["layers"])
        value = row_losses(dense(params["out"], x), batch["y"]).mean()
        return value, {"spreads": spreads}

    params = {
        "in": init_dense(97, FEATURES, 16),
        "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers),
        "out": init_dense(98, 16, CLASSES),
    }
    return plain_program(wrap(optax.sgd(0.05)), params, loss, labelled)


CASES = (
    case("sinkhorn", build_sinkhorn),
    case("while_loop", build_while_loop, "int_metrics"),
    case("branch_on_loss", build_branch_on_loss, "int_metrics"),
    case("scanned_norm", build_scanned_norm),
)

"""Losses that differ from an average over the devices' losses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.zoo.base import Built, Wrap, case, plain_program
from tests.zoo.data import CLASSES, FEATURES, bare, generator, labelled, regression
from tests.zoo.layers import dense, init_dense, init_mlp, mlp, row_losses


def build_sum_loss(wrap: Wrap) -> Built:
    """Builds squared errors summed over the batch, not averaged."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        errors = mlp(params, batch["x"])[:, 0] - batch["y"]
        return jnp.sum(jnp.square(errors)), {"mean_error": jnp.mean(jnp.abs(errors))}

    return plain_program(wrap(optax.sgd(2e-3)), init_mlp(40, (FEATURES, 16, 1)), loss, regression)


def with_weights(step: int, rows: int) -> dict[str, Any]:
    """Makes labelled rows of which the first half is mostly masked out."""
    random = generator(9, step)
    likely = np.where(np.arange(rows) < rows // 2, 0.25, 1.0)
    keep = random.random(rows) < likely
    return {**labelled(step, rows), "keep": keep}


def build_masked_mean(wrap: Wrap) -> Built:
    """Builds a mean over the rows that a mask keeps, unevenly spread over the batch."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        losses = row_losses(mlp(params, batch["x"]), batch["y"])
        value = jnp.sum(losses * batch["keep"]) / jnp.sum(batch["keep"])
        return value, {"kept": batch["keep"].sum(), "safe": losses.mean(where=batch["keep"])}

    params = init_mlp(41, (FEATURES, 16, CLASSES))
    return plain_program(wrap(optax.adam(1e-2)), params, loss, with_weights)


def build_weight_decay_in_loss(wrap: Wrap) -> Built:
    """Builds a loss with two terms: one of the batch, one of the parameters alone."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        decay = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(params))
        fit = row_losses(mlp(params, batch["x"]), batch["y"]).mean()
        return fit + 1e-2 * decay, {"fit": fit, "decay": decay}

    params = init_mlp(42, (FEATURES, 16, CLASSES))
    return plain_program(wrap(optax.sgd(0.1)), params, loss, labelled)


def build_fancy_index(wrap: Wrap) -> Built:
    """Builds the likelihood of each label by indexing with `arange` over the batch."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        logp = jax.nn.log_softmax(mlp(params, batch["x"]))
        return -logp[jnp.arange(batch["y"].shape[0]), batch["y"]].mean(), {}

    params = init_mlp(43, (FEATURES, 16, CLASSES))
    return plain_program(wrap(optax.adam(1e-2)), params, loss, labelled)


def build_covariance(wrap: Wrap) -> Built:
    """Builds an autoencoder whose features' covariance over the batch approaches the identity."""

    def loss(params: Any, batch: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        features = jnp.tanh(dense(params["encode"], batch))
        centred = features - features.mean(axis=0)
        covariance = centred.T @ centred / (batch.shape[0] - 1)
        error = jnp.mean(jnp.square(dense(params["decode"], features) - batch))
        penalty = jnp.sum(jnp.square(covariance - jnp.eye(6)))
        return error + 0.1 * penalty, {"covariance": covariance, "spread": features.std(axis=0)}

    params = {"encode": init_dense(44, FEATURES, 6), "decode": init_dense(45, 6, FEATURES)}
    return plain_program(wrap(optax.adam(3e-3)), params, loss, bare(labelled, "x"))


def build_worst_rows(wrap: Wrap) -> Built:
    """Builds a smooth maximum of the rows' losses, and their maximum itself."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        losses = row_losses(mlp(params, batch["x"]), batch["y"])
        value = jax.nn.logsumexp(losses) + 0.1 * losses.max()
        metrics = {"worst": losses.max(), "best": losses.min(), "where": jnp.argmax(losses)}
        return value, metrics

    params = init_mlp(46, (FEATURES, 16, CLASSES))
    return plain_program(wrap(optax.sgd(0.05)), params, loss, labelled)


CASES = (
    case("sum_loss", build_sum_loss),
    case("masked_mean", build_masked_mean, "int_metrics"),
    case("weight_decay_in_loss", build_weight_decay_in_loss),
    case("fancy_index", build_fancy_index),
    case("covariance", build_covariance),
    case("worst_rows", build_worst_rows, "int_metrics"),
)

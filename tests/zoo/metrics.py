"""Metrics and counters of a batch, exact on any number of devices."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.base import Built, Wrap, case, plain_program, updated
from tests.zoo.data import CLASSES, FEATURES, labelled
from tests.zoo.layers import init_mlp, mlp, row_losses


def small_params() -> Any:
    """Makes the parameters of the net whose metrics are measured."""
    return init_mlp(8, (FEATURES, 16, CLASSES))


def loss_and_logits(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the mean loss and the logits of every row."""
    logits = mlp(params, batch["x"])
    return row_losses(logits, batch["y"]).mean(), logits


def with_logits(params: Any, batch: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Returns (loss, logits) and the gradients."""
    return jax.value_and_grad(loss_and_logits, has_aux=True)(params, batch)


def build_aux_metrics(wrap: Wrap) -> Built:
    """Builds `has_aux` and a dict of every kind of metric."""
    tx, params = wrap(optax.adam(1e-2)), small_params()

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        (value, logits), grads = with_logits(state["params"], batch)
        hits = jnp.argmax(logits, axis=-1) == batch["y"]
        metrics = {
            "loss": value,
            "logits": logits,
            "hits": hits,
            "correct": hits.sum(),
            "grad_norm": optax.tree.norm(grads),
            "all_correct": hits.all(),
            "worst": jnp.max(row_losses(logits, batch["y"])),
        }
        return updated(tx, state, grads), metrics

    return Built({"params": params, "opt_state": tx.init(params)}, train_step, labelled)


def build_grad_norm_metric(wrap: Wrap) -> Built:
    """Builds norms of gradients, updates and parameters, by layer and in all."""
    tx, params = wrap(optax.adam(1e-2)), small_params()

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        (value, _), grads = with_logits(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {
            "loss": value,
            "layers": jax.tree.map(jnp.linalg.norm, grads),
            "gradients": optax.tree.norm(grads),
            "updates": optax.tree.norm(updates),
            "params": optax.tree.norm(params),
        }
        return {"params": params, "opt_state": opt_state}, metrics

    return Built({"params": params, "opt_state": tx.init(params)}, train_step, labelled)


def build_int_metrics(wrap: Wrap) -> Built:
    """Builds counts: of hits, of classes, and the confusion matrix."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        value, logits = loss_and_logits(params, batch)
        guess = jnp.argmax(logits, axis=-1)
        confusion = jnp.zeros((CLASSES, CLASSES), jnp.int32).at[batch["y"], guess].add(1)
        metrics = {
            "correct": jnp.sum(guess == batch["y"]),
            "classes": jnp.bincount(batch["y"], length=CLASSES),
            "confusion": confusion,
            "any_zero": jnp.any(batch["y"] == 0),
            "highest": jnp.max(guess),
        }
        return value, metrics

    return plain_program(wrap(optax.sgd(0.1)), small_params(), loss, labelled)


def build_per_row_outputs(wrap: Wrap) -> Built:
    """Builds metrics with the batch as their first axis, as their last, and among others."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        value, logits = loss_and_logits(params, batch)
        metrics = {
            "losses": row_losses(logits, batch["y"]),
            "guess": jnp.argmax(logits, axis=-1),
            "by_class": jax.nn.softmax(logits).T,
            "outer": jnp.einsum("bi,bj->ibj", logits, logits),
        }
        return value, metrics

    return plain_program(wrap(optax.sgd(0.1)), small_params(), loss, labelled)


def build_counter(wrap: Wrap) -> Built:
    """Builds counters in the state: steps, examples seen, examples of each class, mean input."""
    tx, params = wrap(optax.sgd(0.1)), small_params()

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        (value, _), grads = with_logits(state["params"], batch)
        classes = jax.nn.one_hot(batch["y"], CLASSES, dtype=jnp.int32).sum(axis=0)
        counted = {
            **state,
            "steps": state["steps"] + 1,
            "seen": state["seen"] + batch["x"].shape[0],
            "classes": state["classes"] + classes,
            "mean_input": 0.9 * state["mean_input"] + 0.1 * batch["x"].mean(axis=0),
        }
        return updated(tx, counted, grads), {"loss": value, "seen": counted["seen"]}

    state = {
        "params": params,
        "opt_state": tx.init(params),
        "steps": jnp.zeros((), jnp.int32),
        "seen": jnp.zeros((), jnp.int32),
        "classes": jnp.zeros(CLASSES, jnp.int32),
        "mean_input": jnp.zeros(FEATURES),
    }
    return Built(state, train_step, labelled)


CASES = (
    case("aux_metrics", build_aux_metrics, "core", "row_outputs", "int_metrics"),
    case("grad_norm_metric", build_grad_norm_metric),
    case("int_metrics", build_int_metrics, "int_metrics"),
    case("per_row_outputs", build_per_row_outputs, "row_outputs", "int_metrics"),
    case("counter", build_counter, "int_metrics"),
)

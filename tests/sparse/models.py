"""A small model with lookups, and the same with its table as a dense parameter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfleet as jf
from jaxfleet.capture import EmbeddingTable
from jaxfleet.tables.store import TableStore

VALUES = 40  # limit of keys here, so that a dense table has a row for each
DIM = 4
RATE = 0.1
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (jf.tables.Sgd(RATE), optax.sgd(RATE)),
    "adagrad": (
        jf.tables.Adagrad(RATE, initial=0.1, epsilon=1e-7),
        optax.adagrad(RATE, initial_accumulator_value=0.1, eps=1e-7),
    ),
}


@dataclass(frozen=True)
class Job:
    """A step to distribute.

    Attributes:
        train_step: the step.
        state: its initial state.
        table: the table of its lookups.
    """

    train_step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    table: EmbeddingTable


def batch_of(seed: int, rows: int = 8, *, values: int = VALUES) -> dict[str, np.ndarray]:
    """Returns a batch; some of its keys occur twice, in one leaf and in both."""
    rng = np.random.default_rng(seed)
    return {
        "ids": rng.integers(0, values, (rows, 3)),
        "item": rng.integers(0, values, rows),
        "y": rng.normal(size=rows).astype(np.float32),
    }


def predicted(w: Any, vectors: Any, items: Any) -> Any:
    return jnp.tanh(vectors.sum(axis=1) + items) @ w


def sparse_job(optimizer: Any, **options: Any) -> Job:
    """Returns the model with a table and two lookups per step."""
    table = jf.embedding_table(
        "users", DIM, initializer=jf.tables.Uniform(-0.5, 0.5), optimizer=optimizer, **options
    )
    tx = jf.distributed_optimizer(optax.sgd(RATE))

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_of(params: Any) -> Any:
            vectors = table(params["users"], batch["ids"])
            items = table(params["users"], batch["item"])
            return jnp.mean((predicted(params["w"], vectors, items) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    params = {"users": table.init(), "w": jnp.linspace(-1.0, 1.0, DIM)}
    return Job(train_step, {"params": params, "opt": tx.init(params)}, table)


def run_dense(
    table: EmbeddingTable, optimizer: Any, batches: Sequence[Any]
) -> tuple[Any, list[float]]:
    """Trains the model with a dense table in plain jax: `jnp.take` of a `[V, D]` parameter.

    Args:
        table: source of the initial rows.
        optimizer: optax's, for the dense table.
        batches: training data.

    Returns:
        The parameters and the losses.
    """
    tx = optax.multi_transform(
        {"table": optimizer, "rest": optax.sgd(RATE)}, {"users": "table", "w": "rest"}
    )
    rows = TableStore(table.spec).look_up(np.arange(VALUES))
    params: Any = {"users": jnp.asarray(rows), "w": jnp.linspace(-1.0, 1.0, DIM)}
    opt, losses = tx.init(params), []

    @jax.jit
    def step(params: Any, opt: Any, batch: Any) -> tuple[Any, Any, Any]:
        def loss_of(params: Any) -> Any:
            vectors = jnp.take(params["users"], batch["ids"], axis=0)
            items = jnp.take(params["users"], batch["item"], axis=0)
            return jnp.mean((predicted(params["w"], vectors, items) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    for batch in batches:
        params, opt, loss = step(params, opt, batch)
        losses.append(float(loss))
    return params, losses

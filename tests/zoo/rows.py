"""Programs whose rows interact: a device needs more than its own rows."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.base import Built, Wrap, case, plain_program, updated
from tests.zoo.data import CLASSES, FEATURES, Rows, bare, generator, labelled
from tests.zoo.layers import init_matrix, init_mlp, mlp, row_losses

QUEUE = 24


def unit(x: jax.Array) -> jax.Array:
    """Returns the rows scaled to unit length."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def views(step: int, rows: int) -> Rows:
    """Makes two noisy views of the same rows."""
    x = labelled(step, rows)["x"]
    noise = generator(10, step).standard_normal((2, *x.shape)).astype("float32")
    return {"left": x + noise[0], "right": x + noise[1]}


def build_contrastive(wrap: Wrap) -> Built:
    """Builds two towers: row i of one must find row i of the other in the whole batch."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        left, right = unit(mlp(params, batch["left"])), unit(mlp(params, batch["right"]))
        logits = left @ right.T / 0.5
        labels = jnp.arange(logits.shape[0])
        value = row_losses(logits, labels).mean() + row_losses(logits.T, labels).mean()
        return 0.5 * value, {"found": jnp.mean(jnp.argmax(logits, axis=-1) == labels)}

    return plain_program(wrap(optax.adam(3e-3)), init_mlp(50, (FEATURES, 16, 8)), loss, views)


def build_gram(wrap: Wrap) -> Built:
    """Builds a loss on the Gram matrix of the batch, the rows against themselves."""

    def loss(params: Any, batch: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        z = unit(mlp(params, batch))
        gram = z @ z.T - jnp.eye(z.shape[0])
        return jnp.mean(jnp.square(gram)), {"highest": gram.max()}

    params = init_mlp(51, (FEATURES, 16, 8))
    return plain_program(wrap(optax.sgd(0.1)), params, loss, bare(labelled, "x"))


def build_sorted_batch(wrap: Wrap) -> Built:
    """Builds a trimmed mean: the losses are sorted, without the two highest and lowest."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        losses = jnp.sort(row_losses(mlp(params, batch["x"]), batch["y"]))
        return losses[2:-2].mean(), {"lowest": losses[0], "highest": losses[-1]}

    params = init_mlp(52, (FEATURES, 16, CLASSES))
    return plain_program(wrap(optax.sgd(0.1)), params, loss, labelled)


def build_cumsum(wrap: Wrap) -> Built:
    """Builds a loss on the running mean of the rows' losses."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        losses = row_losses(mlp(params, batch["x"]), batch["y"])
        running = jnp.cumsum(losses) / (1 + jnp.arange(losses.shape[0]))
        return running.mean(), {"running": running}

    params = init_mlp(53, (FEATURES, 16, CLASSES))
    return plain_program(wrap(optax.sgd(0.1)), params, loss, labelled)


def build_neighbours(wrap: Wrap) -> Built:
    """Builds a loss on the difference between each row's output and the next row's."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        logits = mlp(params, batch["x"])
        apart = jnp.mean(jnp.square(logits - jnp.roll(logits, 1, axis=0)))
        smooth = jnp.mean(jnp.square(jnp.diff(logits, axis=0)))
        flipped = jnp.mean(logits * jnp.flip(logits, axis=0))
        return row_losses(logits, batch["y"]).mean() + 0.1 * (apart + smooth + flipped), {}

    params = init_mlp(54, (FEATURES, 16, CLASSES))
    return plain_program(wrap(optax.sgd(0.05)), params, loss, labelled)


def build_queue(wrap: Wrap) -> Built:
    """Builds a contrastive loss against a queue of old rows, which the batch's rows enter."""
    tx, params = wrap(optax.sgd(0.05)), {"net": init_mlp(55, (FEATURES, 16, 8))}

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        keys = unit(mlp(state["params"]["net"], batch["right"]))

        def loss(params: Any) -> jax.Array:
            query = unit(mlp(params["net"], batch["left"]))
            near = jnp.sum(query * keys, axis=-1, keepdims=True)
            logits = jnp.concatenate([near, query @ state["queue"].T], axis=1) / 0.5
            return -jax.nn.log_softmax(logits)[:, 0].mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        queue = jnp.concatenate([keys, state["queue"]])[:QUEUE]
        return updated(tx, {**state, "queue": queue}, grads), {"loss": value}

    queue = unit(init_matrix(56, QUEUE, 8))
    state = {"params": params, "opt_state": tx.init(params), "queue": queue}
    return Built(state, train_step, views)


CASES = (
    case("contrastive", build_contrastive, "crosses_rows"),
    case("gram", build_gram, "crosses_rows"),
    case("sorted_batch", build_sorted_batch, "crosses_rows"),
    case("cumsum", build_cumsum, "crosses_rows", "row_outputs"),
    case("neighbours", build_neighbours, "crosses_rows"),
    case("queue", build_queue, "crosses_rows"),
)

"""Multi-layer perceptrons: by hand, in mixed precision, with layer norm."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.base import Built, Wrap, case, plain_program
from tests.zoo.data import CLASSES, FEATURES, labelled
from tests.zoo.layers import dense, init_dense, init_mlp, layer_norm, mlp, row_losses


def build_mlp(wrap: Wrap) -> Built:
    """Builds two hand-written layers and Adam, fully visible to the compiler."""
    tx = wrap(optax.adam(1e-2))
    params = {"fc1": init_dense(1, FEATURES, 16), "fc2": init_dense(2, 16, CLASSES)}

    def loss(params: dict[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ params["fc1"]["w"] + params["fc1"]["b"])
        logits = hidden @ params["fc2"]["w"] + params["fc2"]["b"]
        return -jnp.mean(jnp.sum(jax.nn.one_hot(y, CLASSES) * jax.nn.log_softmax(logits), axis=-1))

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], jax.Array]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch["x"], batch["y"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, value

    return Built({"params": params, "opt_state": tx.init(params)}, train_step, labelled)


def build_mixed_precision(wrap: Wrap) -> Built:
    """Builds a net that computes in bfloat16 over master parameters in float32."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        logits = mlp(half, batch["x"].astype(jnp.bfloat16)).astype(jnp.float32)
        return row_losses(logits, batch["y"]).mean(), {}

    params = init_mlp(3, (FEATURES, 16, 16, CLASSES))
    return plain_program(wrap(optax.sgd(5e-2, momentum=0.9)), params, loss, labelled)


def build_lion(wrap: Wrap) -> Built:
    """Builds layer norm and GELU under Lion, which keeps only the sign of each update."""
    params = {
        "scale": jnp.ones(FEATURES),
        "up": init_dense(4, FEATURES, 24),
        "down": init_dense(5, 24, CLASSES),
    }

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        hidden = jax.nn.gelu(dense(params["up"], layer_norm(params["scale"], batch["x"])))
        return row_losses(dense(params["down"], hidden), batch["y"]).mean(), {}

    return plain_program(wrap(optax.lion(1e-3)), params, loss, labelled)


def build_feature_major(wrap: Wrap) -> Built:
    """Builds a net that keeps features first and the batch last."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        hidden = jnp.tanh(jnp.einsum("fh,fb->hb", params["in"], batch["x"].T))
        scores = jnp.einsum("hc,hb->cb", params["out"]["w"], hidden) + params["out"]["b"][:, None]
        losses = jax.nn.logsumexp(scores, axis=0) - jnp.sum(
            scores * jax.nn.one_hot(batch["y"], CLASSES, axis=0), axis=0
        )
        return losses.mean(), {"scores": scores}

    params = {"in": init_dense(6, FEATURES, 16)["w"], "out": init_dense(7, 16, CLASSES)}
    return plain_program(wrap(optax.rmsprop(1e-3)), params, loss, labelled)


CASES = (
    case("mlp", build_mlp, "core"),
    case("mixed_precision", build_mixed_precision, "core", "low_precision"),
    case("lion", build_lion),
    case("feature_major", build_feature_major, "row_outputs"),
)

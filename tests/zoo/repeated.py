"""Repeated layers: scanned, recomputed, both."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from tests.zoo.base import Built, Wrap, case, plain_program
from tests.zoo.data import CLASSES, FEATURES, labelled
from tests.zoo.layers import dense, init_dense, row_losses

DEPTH = 4
WIDTH = 16


def stacked() -> dict[str, Any]:
    """Makes a net with the hidden layers stacked in one array."""
    layers = [init_dense(20 + i, WIDTH, WIDTH) for i in range(DEPTH)]
    return {
        "in": init_dense(18, FEATURES, WIDTH),
        "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers),
        "out": init_dense(19, WIDTH, CLASSES),
    }


def build_scan_layers(wrap: Wrap) -> Built:
    """Builds residual layers as one `lax.scan` over their stacked weights."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            return x + jnp.tanh(dense(weights, x)), None

        x, _ = jax.lax.scan(layer, dense(params["in"], batch["x"]), params["layers"])
        return row_losses(dense(params["out"], x), batch["y"]).mean(), {}

    return plain_program(wrap(optax.adam(3e-3)), stacked(), loss, labelled)


def build_remat(wrap: Wrap) -> Built:
    """Builds the layers one by one, each under `jax.checkpoint` with a policy."""

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def layer(weights: Any, x: jax.Array) -> jax.Array:
        return x + jnp.sin(dense(weights, jnp.tanh(x)))

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        x = dense(params["in"], batch["x"])
        for i in range(DEPTH):
            x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]), x)
        return row_losses(dense(params["out"], x), batch["y"]).mean(), {}

    return plain_program(wrap(optax.adam(3e-3)), stacked(), loss, labelled)


def build_remat_names(wrap: Wrap) -> Built:
    """Builds a scan of layers under `jax.checkpoint`, whose policy is a closure over names."""
    policy = jax.checkpoint_policies.save_only_these_names("inner")

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            inner = checkpoint_name(dense(weights, jnp.tanh(x)), "inner")
            return x + jnp.sin(inner), None

        again = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        x, _ = jax.lax.scan(again, dense(params["in"], batch["x"]), params["layers"])
        return row_losses(dense(params["out"], x), batch["y"]).mean(), {}

    return plain_program(wrap(optax.sgd(0.05)), stacked(), loss, labelled)


CASES = (
    case("scan_layers", build_scan_layers, "core"),
    case("remat", build_remat, "core"),
    case("remat_names", build_remat_names),
)

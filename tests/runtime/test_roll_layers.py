"""Rolling a step's layers into loops preserves its results."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from tests.shared_zoo import arrays

ROWS, WIDTH, LENGTH = 16, 8, 4
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
Layer = Callable[[Any, Any, Any], Any]


def dense(p: Any, h: Any, key: Any) -> Any:
    """A residual block with dropout."""
    new = jnp.tanh(h @ p["a"])
    kept = jax.random.bernoulli(key, 0.8, new.shape)
    return h + jnp.where(kept, new / 0.8, 0.0) @ p["b"]


def attend(p: Any, h: Any, _: Any) -> Any:
    """Attention of one head and an MLP."""
    x = h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-6)
    scores = jnp.einsum("bqd,bkd->bqk", x @ p["a"], x) / np.sqrt(WIDTH)
    h = h + jax.nn.softmax(scores) @ x
    return h + jax.nn.silu(h @ p["b"])


def stack(layer: Layer, count: int, tx: optax.GradientTransformation) -> tuple[Any, Any]:
    """Returns a step of a projection and `count` layers, and its example."""
    optimizer, keys = jf.distributed_optimizer(tx), jax.random.split(jax.random.key(0), 2 * count)
    first, *weights = (0.3 * jax.random.normal(key, (WIDTH, WIDTH)) for key in (keys[0], *keys))
    layers = [{"a": a, "b": b} for a, b in zip(weights[::2], weights[1::2], strict=True)]

    def train_step(state: Any, batch: Any) -> Any:
        params, opt_state, key = state

        def loss_of(params: Any) -> Any:
            h = batch["x"] @ params["first"]
            for number, p in enumerate(params["layers"]):
                h = layer(p, h, jax.random.fold_in(key, number))
            return jnp.mean((h - batch["x"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        key = jax.random.split(key, 1)[0]
        return (optax.apply_updates(params, updates), opt_state, key), {"loss": loss}

    params = {"first": first, "layers": layers}
    return train_step, ((params, optimizer.init(params), jax.random.key(1)), batch_of(ROWS))


def batch_of(rows: int) -> Any:
    shape = (rows, LENGTH, WIDTH)
    return {"x": np.random.default_rng(rows).standard_normal(shape).astype(np.float32)}


def trained(step: Any, state: Any) -> list[Any]:
    """Returns state and metrics after two steps."""
    found = []
    state = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)
    for rows in (ROWS, ROWS):
        state, metrics = step(state, batch_of(rows))
        found += arrays(metrics)
    return [*found, *arrays(state)]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("layer", "count", "tx", "devices", "loops"),
    [
        pytest.param(dense, 6, CLIPPED, 1, [6, 5, 6], id="dropout-adam"),
        pytest.param(
            attend, 4, optax.sgd(0.1), 4, [4, 3], id="attention-sgd-4", marks=pytest.mark.grid
        ),
    ],
)
def test_a_rolled_step_computes_what_the_step_computes(
    layer: Layer, count: int, tx: Any, devices: int, loops: list[int]
) -> None:
    built = stack(layer, count, tx)
    plain = jf.distribute(*built, jf.DistributedStrategy(devices=devices))
    strategy = jf.DistributedStrategy(devices=devices, passes="recompute,roll_layers")
    step = jf.distribute(*built, strategy)
    root = step.program.root
    assert [op.attrs["length"] for op in root.ops if op.type == "jax.scan"] == loops
    for x, y in zip(trained(step, built[1][0]), trained(plain, built[1][0]), strict=True):
        # Executables of other operators sum in another order: some ULPs.
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)

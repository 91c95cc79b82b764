"""A user's step that only the first process ever imports: remat, scan and MultiSteps."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfleet as jf

ROWS, FEATURES, WIDTH, DEPTH, CLASSES = 8, 6, 16, 3, 4


class Layer(nn.Module):
    """A residual layer in the form of `nn.scan`."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + jnp.tanh(nn.Dense(WIDTH)(nn.LayerNorm()(x))), None


class Net(nn.Module):
    """Layers in a loop, recomputed in the backward pass."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        layers = nn.scan(
            nn.remat(Layer, policy=policy, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=DEPTH,
        )
        x, _ = layers()(nn.Dense(WIDTH)(x), None)
        return nn.Dense(CLASSES)(x)


tx = jf.distributed_optimizer(optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2))


def train_step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    def loss(params: Any) -> jax.Array:
        logits = Net().apply(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, {"loss": value}


def example() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a state whose next gradient makes an update, and a batch."""
    random = np.random.default_rng(0)
    batch = {
        "x": random.normal(size=(ROWS, FEATURES)).astype(np.float32),
        "y": random.integers(0, CLASSES, ROWS).astype(np.int32),
    }
    params = jax.jit(Net().init)(jax.random.key(0), batch["x"])
    opt_state: Any = tx.init(params)
    opt_state = opt_state._replace(mini_step=jnp.int32(1))
    return {"params": params, "opt_state": opt_state}, batch

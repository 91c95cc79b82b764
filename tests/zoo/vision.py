"""A convolutional net with batch normalisation, in Flax linen with a TrainState."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

from tests.zoo.base import Built, Wrap, case
from tests.zoo.data import images
from tests.zoo.layers import init_flax, row_losses


class Cnn(nn.Module):
    """Two convolutions with batch normalisation, max and average pooling, one dense layer.

    The convolutions have no bias: its gradient would be zero up to rounding, since the
    normalisation removes the mean.
    """

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        for features in (4, 8):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.relu(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.avg_pool(x, (2, 2))
        return nn.Dense(4)(x.reshape((x.shape[0], -1)))


class State(train_state.TrainState):
    """A TrainState that also holds the running statistics."""

    batch_stats: Any


def build_cnn_batchnorm(wrap: Wrap) -> Built:
    """Builds the net with the usual TrainState step, loss and accuracy."""
    model = Cnn()
    variables = init_flax(model, images(0, 2)["image"], train=False)
    state = State.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=wrap(optax.adam(3e-3)),
        batch_stats=variables["batch_stats"],
    )
    return Built(state, train_step, images)


def train_step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
    """Updates parameters and running statistics with one batch of images."""

    def loss(params: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(
            variables, batch["image"], train=True, mutable=["batch_stats"]
        )
        return row_losses(logits, batch["label"]).mean(), (logits, changed["batch_stats"])

    (value, (logits, batch_stats)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    return state, {"loss": value, "accuracy": accuracy}


CASES = (case("cnn_batchnorm", build_cnn_batchnorm, "core", "batchnorm"),)

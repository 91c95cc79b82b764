"""Flax NNX: objects split into a graph and a state, merged again inside the step."""

from typing import Any

import jax
import optax
from flax import nnx

from tests.zoo.base import Built, Wrap, case
from tests.zoo.data import CLASSES, FEATURES, labelled
from tests.zoo.layers import row_losses


class Perceptron(nnx.Module):
    """Two linear layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(FEATURES, 16, rngs=rngs)
        self.last = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.first(x)))


class Regularised(nnx.Module):
    """Two linear layers with batch normalisation and dropout between them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(FEATURES, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def mean_loss(model: Any, batch: Any) -> jax.Array:
    """Returns the mean cross entropy of the model over the batch."""
    return row_losses(model(batch["x"]), batch["y"]).mean()


def with_optimizer(model: nnx.Module, tx: optax.GradientTransformation) -> Built:
    """Builds the step around `nnx.Optimizer`; the state is that of model and optimizer."""
    graph, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

    def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        model, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(mean_loss)(model, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {"loss": value}

    return Built(state, train_step, labelled)


def build_nnx(wrap: Wrap) -> Built:
    """Builds the plain net with `nnx.Optimizer`."""
    return with_optimizer(Perceptron(nnx.Rngs(0)), wrap(optax.adam(1e-2)))


def build_nnx_regularised(wrap: Wrap) -> Built:
    """Builds the net whose normalisation and dropout have their own state."""
    model = Regularised(nnx.Rngs(params=0, dropout=1))
    return with_optimizer(model, wrap(optax.sgd(0.1, momentum=0.9)))


def build_nnx_optax(wrap: Wrap) -> Built:
    """Builds the plain net with its parameters split off and Optax called directly."""
    tx = wrap(optax.adam(1e-2))
    graph, params = nnx.split(Perceptron(nnx.Rngs(1)), nnx.Param)

    def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(lambda p: mean_loss(nnx.merge(graph, p), batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return Built((params, tx.init(params)), train_step, labelled)


CASES = (
    case("nnx", build_nnx, "core"),
    case("nnx_regularised", build_nnx_regularised, "batchnorm", "random"),
    case("nnx_optax", build_nnx_optax),
)

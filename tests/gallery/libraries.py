"""States in the styles of libraries that need not be installed, and of similar classes."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.gallery.parts import Spread
from tests.zoo import Built
from tests.zoo.base import Wrap
from tests.zoo.data import CLASSES, FEATURES, labelled
from tests.zoo.layers import init_matrix


def fields(step: int, rows: int) -> tuple[Any, Any]:
    made = labelled(step, rows)
    return made["x"], made["y"]


def build_equinox(wrap: Wrap) -> Built:
    """Builds Equinox' quickstart: a module is a tree, of which the arrays are filtered."""
    eqx = importlib.import_module("equinox")
    tx = wrap(optax.adam(1e-2))
    model = eqx.nn.MLP(FEATURES, CLASSES, 8, 1, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def train_step(arrays: Any, opt_state: Any, x: Any, y: Any) -> Any:
        @eqx.filter_value_and_grad
        def loss(model: Any, x: Any, y: Any) -> jax.Array:
            scores = jax.vmap(model)(x)
            return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

        model = eqx.combine(arrays, static)
        value, grads = loss(model, x, y)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        model = eqx.apply_updates(model, updates)
        return eqx.filter(model, eqx.is_inexact_array), opt_state, value

    return Spread((arrays, tx.init(arrays)), train_step, fields)


def build_haiku(wrap: Wrap) -> Built:
    """Builds Haiku's: a transformed function, with separate parameters, statistics and key."""
    hk = importlib.import_module("haiku")
    tx = wrap(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))

    def forward(x: Any, is_training: bool) -> Any:
        x = hk.Linear(8, with_bias=False)(x)
        x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training)
        return hk.Linear(CLASSES)(hk.dropout(hk.next_rng_key(), 0.2, jax.nn.relu(x)))

    network = hk.transform_with_state(forward)
    params, seen = network.init(jax.random.key(0), jnp.zeros((2, FEATURES)), is_training=True)

    def update(params: Any, seen: Any, opt: Any, rng: Any, batch: Any) -> Any:
        x, y = batch

        def loss(params: Any) -> Any:
            scores, new = network.apply(params, seen, rng, x, is_training=True)
            decay = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
            losses = optax.softmax_cross_entropy_with_integer_labels(scores, y)
            return losses.mean() + 1e-4 * decay, new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = tx.update(grads, opt)
        return optax.apply_updates(params, updates), new, opt, value

    def batch(number: int, rows: int) -> Any:
        return jax.random.PRNGKey(number), fields(number, rows)

    return Spread((params, seen, tx.init(params)), update, batch)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """A module as a tree, with a part that is not an array (as in Equinox, Penzai, Treex)."""

    w: Any
    b: Any
    activation: str = field(metadata={"static": True}, default="tanh")

    def __call__(self, x: jax.Array) -> jax.Array:
        found = x @ self.w + self.b
        return jnp.tanh(found) if self.activation == "tanh" else found


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Learner:
    """All trained values, in one object that is replaced."""

    layers: Any  # a tuple of them
    opt_state: Any
    step: Any
    name: str = field(metadata={"static": True}, default="learner")


def build_dataclasses(wrap: Wrap) -> Built:
    """Builds a learner of dataclasses, replaced by every step."""
    tx = wrap(optax.adamw(1e-2))

    def step(learner: Learner, batch: Any) -> tuple[Learner, Any]:
        def loss(layers: Any) -> jax.Array:
            x = batch["x"]
            for layer in layers:
                x = layer(x)
            return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"]).mean()

        value, grads = jax.value_and_grad(loss)(learner.layers)
        updates, opt_state = tx.update(grads, learner.opt_state, learner.layers)
        layers = optax.apply_updates(learner.layers, updates)
        new = replace(learner, layers=layers, opt_state=opt_state, step=learner.step + 1)
        return new, {"loss": value}

    first = Layer(init_matrix(1, FEATURES, 8), jnp.zeros(8))
    layers: Any = (first, Layer(init_matrix(2, 8, CLASSES), jnp.zeros(CLASSES), "none"))
    return Built(Learner(layers, tx.init(layers), jnp.zeros((), jnp.int32)), step, labelled)


def _installed() -> dict[str, Callable[[Wrap], Built]]:
    builders = {"equinox": build_equinox, "haiku": build_haiku}
    return {name: made for name, made in builders.items() if importlib.util.find_spec(name)}


PROGRAMS: dict[str, Callable[[Wrap], Built]] = {
    **_installed(),
    "dataclasses": build_dataclasses,
}
"""Those of libraries that are installed, and those that need none."""

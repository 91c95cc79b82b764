"""Loss scales, norms exchanged twice, and other values that decide about an update."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

from tests.gallery.parts import State, cross_entropy, net, started, updated
from tests.zoo import Built
from tests.zoo.base import Wrap
from tests.zoo.data import labelled

CONTRIB: Any = optax.contrib  # mypy does not see its names


def build_dynamic_scale(wrap: Wrap) -> Built:
    """Builds Flax's dynamic scale: the update applies if all gradients are finite."""
    tx = wrap(optax.adam(1e-2))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        gradient = state["scale"].value_and_grad(lambda params: cross_entropy(params, batch))
        scale, finite, value, grads = gradient(state["params"])
        new = updated(tx, state, grads)
        kept = jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, state)
        return {**kept, "scale": scale}, {"loss": value, "finite": finite}

    scale = DynamicScale(growth_interval=2, scale=2.0**126)
    return Built(started(tx, net(), scale=scale), step, labelled)


@jax.tree_util.register_pytree_node_class
class LossScale:
    """A scale that converts its leaves to arrays, as jmp's does."""

    def __init__(self, scale: Any, counter: Any) -> None:
        self.scale, self.counter = jnp.asarray(scale), jnp.asarray(counter)

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        return (self.scale, self.counter), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "LossScale":
        return cls(*children)

    def after(self, finite: jax.Array) -> "LossScale":
        scale = jnp.where(finite, self.scale * 2, self.scale / 2)
        return LossScale(scale, jnp.where(finite, self.counter + 1, 0))


def build_all_finite(wrap: Wrap) -> Built:
    """Builds jmp's idiom: scale, unscale, and choose by whether all gradients are finite."""
    tx = wrap(optax.sgd(0.1, momentum=0.9))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        scale = state["scale"].scale

        def scaled(params: Any) -> jax.Array:
            return cross_entropy(params, batch) * scale

        value, grads = jax.value_and_grad(scaled)(state["params"])
        grads = jax.tree.map(lambda leaf: leaf / scale, grads)
        finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)]).all()
        new = updated(tx, state, grads)
        kept = jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, state)
        return {**kept, "scale": state["scale"].after(finite)}, {"loss": value / scale}

    scale = LossScale(jnp.float32(8.0), jnp.int32(0))
    return Built(started(tx, net(), scale=scale), step, labelled)


def around(optimizer: Callable[[], Any], *, value: bool = False) -> Callable[[Wrap], Built]:
    """Returns a builder of the net around one optimizer, optionally with the loss."""

    def build(wrap: Wrap) -> Built:
        tx = wrap(optimizer())

        def step(state: State, batch: Any) -> tuple[State, Any]:
            loss, grads = jax.value_and_grad(cross_entropy)(state["params"], batch)
            extra = {"value": loss} if value else {}
            return updated(tx, state, grads, **extra), {"loss": loss}

        return Built(started(tx, net()), step, labelled)

    return build


PROGRAMS: dict[str, Callable[[Wrap], Built]] = {
    "dynamic_scale": build_dynamic_scale,
    "all_finite": build_all_finite,
    "prodigy": around(CONTRIB.prodigy),
    "dadapt": around(CONTRIB.dadapt_adamw),
    "mechanize": around(lambda: CONTRIB.mechanize(optax.sgd(0.1))),
    "momo_adam": around(lambda: CONTRIB.momo_adam(0.1), value=True),
    "polyak": around(lambda: optax.polyak_sgd(0.1), value=True),
    "adam_clipped": around(lambda: optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(0.01))),
}

"""Gradients beyond that of a mean loss: per example, of an update, of norms."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.gallery.parts import State, cross_entropy, net, started, updated
from tests.zoo import Built
from tests.zoo.base import Wrap
from tests.zoo.data import labelled
from tests.zoo.layers import mlp

CONTRIB: Any = optax.contrib  # mypy does not see its names


def norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(tree)))


def clipped_sums() -> optax.GradientTransformation:
    """Returns a transformation that clips per-example gradients and averages them."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        leaves = jax.tree.leaves(updates)
        norms = jnp.sqrt(sum(jnp.square(x).reshape(x.shape[0], -1).sum(1) for x in leaves))
        scale = jnp.minimum(1.0, 0.5 / norms)
        return jax.tree.map(lambda x: jnp.tensordot(scale, x, 1) / x.shape[0], updates), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def build_clipped_examples(wrap: Wrap) -> Built:
    """Builds DP-SGD without its noise: the optimizer gets per-example gradients."""
    tx = wrap(optax.chain(clipped_sums(), optax.sgd(0.1)))

    def of_one(params: Any, example: Any) -> jax.Array:
        return cross_entropy(params, jax.tree.map(lambda leaf: leaf[None], example))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        values, grads = jax.vmap(jax.value_and_grad(of_one), (None, 0))(state["params"], batch)
        return updated(tx, state, grads), {"loss": values.mean()}

    return Built(started(tx, net()), step, labelled)


def build_gradnorm(wrap: Wrap) -> Built:
    """Builds two losses weighted by the norms of their gradients."""
    tx = wrap(optax.adam(1e-2))

    def losses(params: Any, batch: Any) -> jax.Array:
        return jnp.stack([cross_entropy(params, batch), jnp.abs(mlp(params, batch["x"])).mean()])

    def step(state: State, batch: Any) -> tuple[State, Any]:
        def weighed(params: Any) -> jax.Array:
            return (state["weights"] * losses(params, batch)).sum()

        value, grads = jax.value_and_grad(weighed)(state["params"])
        each = [jax.grad(lambda p, n=n: losses(p, batch)[n])(state["params"]) for n in range(2)]
        norms = jnp.stack([norm(tree) for tree in each])
        weights = 0.9 * state["weights"] + 0.1 * norms.mean() / norms
        return {**updated(tx, state, grads), "weights": weights}, {"loss": value}

    return Built(started(tx, net(), weights=jnp.ones(2)), step, labelled)


def build_lookahead(wrap: Wrap) -> Built:
    """Builds fast and slow parameters, of which the fast ones are differentiated."""
    tx = wrap(optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(cross_entropy)(state["params"].fast, batch)
        return updated(tx, state, grads), {"loss": value}

    pair = optax.LookaheadParams.init_synced(net())
    return Built(started(tx, pair), step, labelled)


def build_sam(wrap: Wrap) -> Built:
    """Builds SAM as in Optax: the optimizer computes gradients of the batch itself."""
    ascent = optax.chain(CONTRIB.normalize(), optax.sgd(0.05))
    tx = wrap(CONTRIB.sam(optax.adam(1e-2), ascent, sync_period=2, opaque_mode=True))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(cross_entropy)(state["params"], batch)
        extra = {"grad_fn": lambda params, _: jax.grad(cross_entropy)(params, batch)}
        return updated(tx, state, grads, **extra), {"loss": value}

    return Built(started(tx, net()), step, labelled)


def build_line_search(wrap: Wrap) -> Built:
    """Builds L-BFGS, whose line search evaluates the loss in a loop."""
    tx = wrap(optax.lbfgs(memory_size=2))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        def loss(params: Any) -> jax.Array:
            return cross_entropy(params, batch)

        value, grads = jax.value_and_grad(loss)(state["params"])
        new = updated(tx, state, grads, value=value, grad=grads, value_fn=loss)
        return new, {"loss": value}

    return Built(started(tx, net()), step, labelled)


def build_maml(wrap: Wrap) -> Built:
    """Builds a gradient through one plain step on half of each example's features."""
    tx = wrap(optax.adam(1e-2))

    def after_a_step(params: Any, batch: Any) -> jax.Array:
        grads = jax.grad(cross_entropy)(params, batch)
        moved = jax.tree.map(lambda x, g: x - 0.1 * g, params, grads)
        return cross_entropy(moved, {**batch, "x": batch["x"][:, ::-1]})

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(after_a_step)(state["params"], batch)
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, net()), step, labelled)


def build_learned_rate(wrap: Wrap) -> Built:
    """Builds a learning rate that is trained by the gradient through an update."""
    inner, outer = wrap(optax.sgd(0.1, momentum=0.9)), wrap(optax.adam(1e-2))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        model = state["model"]

        def after(rate: jax.Array) -> tuple[jax.Array, Any]:
            grads = jax.grad(cross_entropy)(model["params"], batch)
            updates, opt = inner.update(grads, model["opt"], model["params"])
            moved = jax.tree.map(lambda leaf: leaf * jnp.exp(rate), updates)
            params = optax.apply_updates(model["params"], moved)
            value = cross_entropy(params, {**batch, "x": batch["x"][:, ::-1]})
            return value, {"params": params, "opt": opt}

        (value, new), grad = jax.value_and_grad(after, has_aux=True)(state["rate"]["params"])
        return {"model": new, "rate": updated(outer, state["rate"], grad)}, {"loss": value}

    state = {"model": started(inner, net()), "rate": started(outer, jnp.zeros(()))}
    return Built(state, step, labelled)


PROGRAMS: dict[str, Callable[[Wrap], Built]] = {
    "clipped_examples": build_clipped_examples,
    "gradnorm": build_gradnorm,
    "lookahead": build_lookahead,
    "sam": build_sam,
    "line_search": build_line_search,
    "maml": build_maml,
    "learned_rate": build_learned_rate,
}

"""Optimizers that use more than a gradient: curvature, whole matrices, earlier losses."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.gallery.parts import State, cross_entropy, net, started, updated
from tests.gallery.scales import around
from tests.zoo import Built
from tests.zoo.base import Wrap
from tests.zoo.data import labelled

CONTRIB: Any = optax.contrib  # mypy does not see its names


def inverse_fourth_root(matrix: jax.Array) -> jax.Array:
    """Returns the root by coupled Newton iterations, until convergence."""
    identity = jnp.eye(matrix.shape[0])
    matrix = matrix + 1e-4 * identity
    scale = 5 / (2 * jnp.linalg.norm(matrix))

    def more(carry: Any) -> jax.Array:
        error, count, _, _ = carry
        return (error > 1e-4) & (count < 30)

    def body(carry: Any) -> Any:
        _, count, power, root = carry
        factor = (5 * identity - power) / 4
        power = jnp.linalg.matrix_power(factor, 4) @ power
        return jnp.abs(power - identity).max(), count + 1, power, root @ factor

    start = (jnp.float32(1.0), 0, matrix * scale, identity * scale**0.25)
    return jax.lax.while_loop(more, body, start)[3]


class Shampoo(NamedTuple):
    """Sums of a matrix' outer products on its left and right; empty for vectors."""

    left: Any
    right: Any


def shampoo(rate: float) -> optax.GradientTransformation:
    """Returns scalable_shampoo's idea: a matrix' gradient between two roots, grafted to SGD."""

    def init(params: Any) -> Shampoo:
        def eye(axis: int) -> Any:
            return jax.tree.map(lambda x: jnp.eye(x.shape[axis]) if x.ndim == 2 else None, params)

        return Shampoo(eye(0), eye(1))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params

        def add(old: Any, g: jax.Array, *, left: bool) -> Any:
            return None if g.ndim != 2 else 0.9 * old + 0.1 * (g @ g.T if left else g.T @ g)

        none = {"is_leaf": lambda x: x is None}
        left = jax.tree.map(lambda o, g: add(o, g, left=True), state.left, updates, **none)
        right = jax.tree.map(lambda o, g: add(o, g, left=False), state.right, updates, **none)

        def of(g: jax.Array, one: Any, two: Any) -> jax.Array:
            if g.ndim != 2:
                return -rate * g
            made = inverse_fourth_root(one) @ g @ inverse_fourth_root(two)
            return -rate * made * (jnp.linalg.norm(g) / (jnp.linalg.norm(made) + 1e-9))

        return jax.tree.map(of, updates, left, right), Shampoo(left, right)

    return optax.GradientTransformation(init, update)


def build_shampoo(wrap: Wrap) -> Built:
    """Builds Shampoo by hand behind Optax's interface."""
    return around(lambda: shampoo(0.1))(wrap)


def build_hessian_diagonal(wrap: Wrap) -> Built:
    """Builds AdaHessian: a random estimate of the Hessian's diagonal drives the second moment."""
    tx = wrap(optax.chain(optax.scale_by_adam(), optax.scale(-1e-2)))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        key, drawing = jax.random.split(state["key"])

        def loss(params: Any) -> jax.Array:
            return cross_entropy(params, batch)

        value, grads = jax.value_and_grad(loss)(state["params"])
        leaves, tree = jax.tree.flatten(state["params"])
        keys = jax.random.split(drawing, len(leaves))
        signs = [
            jax.random.rademacher(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)
        ]
        signs = jax.tree.unflatten(tree, signs)
        _, products = jax.jvp(jax.grad(loss), (state["params"],), (signs,))
        curved = jax.tree.map(lambda s, h: jnp.abs(s * h), signs, products)
        diagonal = jax.tree.map(lambda o, h: 0.9 * o + 0.1 * h, state["diagonal"], curved)
        scaled = jax.tree.map(lambda g, h: g / jnp.maximum(h, 0.1), grads, diagonal)
        return {**updated(tx, state, scaled), "diagonal": diagonal, "key": key}, {"loss": value}

    zeros = jax.tree.map(jnp.zeros_like, net())
    return Built(started(tx, net(), diagonal=zeros, key=jax.random.key(0)), step, labelled)


def build_schedule_free(wrap: Wrap) -> Built:
    """Builds schedule-free AdamW, and a metric at the evaluation parameters."""
    tx = wrap(CONTRIB.schedule_free_adamw(1e-2, warmup_steps=2))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(cross_entropy)(state["params"], batch)
        at = CONTRIB.schedule_free_eval_params(state["opt"], state["params"])
        return updated(tx, state, grads), {"loss": value, "evaluated": cross_entropy(at, batch)}

    return Built(started(tx, net()), step, labelled)


def build_gradient_surgery(wrap: Wrap) -> Built:
    """Builds PCGrad: the gradients of two losses, each without its conflicting component."""
    tx = wrap(optax.adam(1e-2))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        def second(params: Any) -> jax.Array:
            return cross_entropy(params, {**batch, "x": batch["x"][:, ::-1]})

        value, one = jax.value_and_grad(cross_entropy)(state["params"], batch)
        two = jax.grad(second)(state["params"])

        def without(a: Any, b: Any) -> Any:
            dot = optax.tree.vdot(a, b)
            share = jnp.minimum(dot, 0.0) / (optax.tree.vdot(b, b) + 1e-12)
            return jax.tree.map(lambda x, y: x - share * y, a, b)

        grads = jax.tree.map(jnp.add, without(one, two), without(two, one))
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, net()), step, labelled)


def accumulated() -> Any:
    """Returns an update at every second gradient, only if it is finite."""
    inner = optax.apply_if_finite(optax.adamw(1e-2), max_consecutive_errors=3)
    return optax.MultiSteps(inner, every_k_schedule=2).gradient_transformation()


def on_plateau() -> Any:
    """Returns a rate that shrinks when losses do not."""
    return optax.chain(optax.adam(1e-2), CONTRIB.reduce_on_plateau(patience=1, cooldown=1))


def adaptive_clipping() -> Any:
    """Returns NFNets' clipping: by unit, against the norm of the parameters."""
    return optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1, momentum=0.9, nesterov=True))


PROGRAMS: dict[str, Callable[[Wrap], Built]] = {
    "shampoo": build_shampoo,
    "hessian_diagonal": build_hessian_diagonal,
    "schedule_free": build_schedule_free,
    "gradient_surgery": build_gradient_surgery,
    "muon": around(lambda: CONTRIB.muon(1e-2)),
    "novograd": around(lambda: optax.chain(optax.centralize(), optax.novograd(1e-2))),
    "accumulated": around(accumulated),
    "on_plateau": around(on_plateau, value=True),
    "adaptive_clipping": around(adaptive_clipping),
}

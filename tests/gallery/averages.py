"""Averages of weights that a loss or a metric reads: teachers, momentum encoders."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.gallery.parts import State, averaged, cross_entropy, net, started, unit, updated
from tests.zoo import Built
from tests.zoo.base import Wrap
from tests.zoo.data import CLASSES, generator, labelled
from tests.zoo.layers import mlp


def build_mean_teacher(wrap: Wrap) -> Built:
    """Builds a loss that keeps a student close to the average of its weights."""
    tx = wrap(optax.sgd(0.1, momentum=0.9))

    def loss(params: Any, teacher: Any, batch: Any) -> jax.Array:
        apart = mlp(params, batch["x"]) - jax.lax.stop_gradient(mlp(teacher, batch["x"]))
        return cross_entropy(params, batch) + jnp.square(apart).mean()

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], state["teacher"], batch)
        new = updated(tx, state, grads)
        teacher = averaged(state["teacher"], new["params"])
        return {**new, "teacher": teacher}, {"loss": value}

    return Built(started(tx, net(), teacher=net()), step, labelled)


def build_byol(wrap: Wrap) -> Built:
    """Builds a target whose averaging weight follows a schedule, and LARS."""
    tx = wrap(optax.lars(0.1))

    def loss(params: Any, target: Any, batch: Any) -> jax.Array:
        wanted = jax.lax.stop_gradient(unit(mlp(target, 0.9 * batch["x"])))
        return jnp.square(unit(mlp(params, batch["x"])) - wanted).sum(axis=-1).mean()

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], state["target"], batch)
        new = updated(tx, state, grads)
        weight = 0.1 * (jnp.cos(jnp.pi * state["count"] / 10) + 1) / 2
        target = averaged(state["target"], new["params"], weight)
        return {**new, "target": target, "count": state["count"] + 1}, {"loss": value}

    return Built(started(tx, net(), target=net(2), count=jnp.zeros(())), step, labelled)


def build_moco(wrap: Wrap) -> Built:
    """Builds a momentum encoder and a queue of its outputs for earlier batches."""
    tx = wrap(optax.sgd(0.1))

    def loss(params: Any, keys: Any, queue: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        query = unit(mlp(params, batch["x"]))
        key = jax.lax.stop_gradient(unit(mlp(keys, 1.1 * batch["x"])))
        scores = jnp.concatenate([(query * key).sum(-1, keepdims=True), query @ queue.T], axis=1)
        return -jax.nn.log_softmax(scores / 0.2)[:, 0].mean(), key

    def step(state: State, batch: Any) -> tuple[State, Any]:
        keys = averaged(state["keys"], state["params"])
        (value, key), grads = jax.value_and_grad(loss, has_aux=True)(
            state["params"], keys, state["queue"], batch
        )
        queue = jnp.concatenate([key, state["queue"]])[: state["queue"].shape[0]]
        return {**updated(tx, state, grads), "keys": keys, "queue": queue}, {"loss": value}

    queue = generator(11).standard_normal((24, CLASSES)).astype(np.float32)
    return Built(started(tx, net(), keys=net(), queue=queue), step, labelled)


def build_moco_ring(wrap: Wrap) -> Built:
    """Builds MoCo as its authors do: a ring of columns with a pointer, both encoders' keys."""
    tx = wrap(optax.sgd(0.1, momentum=0.9))

    def encode(params: Any, x: jax.Array) -> jax.Array:
        return unit(mlp(params, x))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        key, drawing = jax.random.split(state["key"])
        order = jax.random.permutation(drawing, batch["x"].shape[0])
        keys = averaged(state["keys"], state["params"], 0.01)
        k = encode(keys, 1.1 * batch["x"][order])[jnp.argsort(order)]
        k = jax.lax.stop_gradient(k)

        def loss(params: Any) -> jax.Array:
            q = encode(params, batch["x"])
            good = jnp.einsum("nc,nc->n", q, k)[:, None]
            scores = jnp.concatenate([good, q @ state["queue"]], axis=1) / 0.07
            labels = jnp.zeros(scores.shape[0], jnp.int32)
            return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        at = state["at"]
        queue = jax.lax.dynamic_update_slice(state["queue"], k.T, (0, at))
        at = (at + k.shape[0]) % queue.shape[1]
        more = {"keys": keys, "queue": queue, "at": at, "key": key}
        return {**updated(tx, state, grads), **more}, {"loss": value}

    queue = unit(generator(12).standard_normal((CLASSES, 64)).astype(np.float32))
    more = {"queue": queue, "at": jnp.zeros((), jnp.int32), "key": jax.random.key(0)}
    return Built(started(tx, net(), keys=net(), **more), step, labelled)


def build_average_as_metric(wrap: Wrap) -> Built:
    """Builds a metric of averaged weights, before and after the update."""
    tx = wrap(optax.adam(1e-2))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(cross_entropy)(state["params"], batch)
        new = updated(tx, state, grads)
        average = averaged(state["average"], new["params"])
        metrics = {
            "loss": value,
            "before": cross_entropy(state["average"], batch),
            "after": cross_entropy(average, batch),
        }
        return {**new, "average": average}, metrics

    return Built(started(tx, net(), average=net()), step, labelled)


PROGRAMS: dict[str, Callable[[Wrap], Built]] = {
    "mean_teacher": build_mean_teacher,
    "byol": build_byol,
    "moco": build_moco,
    "moco_ring": build_moco_ring,
    "average_as_metric": build_average_as_metric,
}

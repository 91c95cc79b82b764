"""Reinforcement learning: target networks, two optimizers, several updates in one call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.gallery.parts import State, averaged, cross_entropy, net, started, updated
from tests.zoo import Built
from tests.zoo.base import Wrap
from tests.zoo.data import labelled
from tests.zoo.layers import mlp


def build_dqn(wrap: Wrap) -> Built:
    """Builds Q-learning with a target network that is copied every second step."""
    tx = wrap(optax.adam(1e-2))

    def loss(params: Any, target: Any, batch: Any) -> jax.Array:
        chosen = jnp.take_along_axis(mlp(params, batch["x"]), batch["y"][:, None], 1)[:, 0]
        wanted = 0.1 + 0.9 * mlp(target, -batch["x"]).max(axis=-1)
        return optax.huber_loss(chosen, jax.lax.stop_gradient(wanted)).mean()

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], state["target"], batch)
        new = updated(tx, state, grads)
        due = state["count"] % 2 == 1
        target = optax.periodic_update(new["params"], state["target"], state["count"], 2)
        return {**new, "target": target, "count": state["count"] + 1}, {"loss": value, "due": due}

    params = net()
    state = started(tx, params, target=net(2), count=jnp.zeros((), jnp.int32))
    return Built(state, step, labelled)


def build_actor_critic(wrap: Wrap) -> Built:
    """Builds a critic with a target and an actor judged by the new critic, as in SAC and TD3."""
    return _actor_critic(wrap(optax.adam(1e-2)), wrap(optax.adam(1e-2)))


def build_clipped_actor_critic(wrap: Wrap) -> Built:
    """Builds the same with a clip by the norm over each net, as in acme's D4PG."""
    clipped = [optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)) for _ in range(2)]
    return _actor_critic(*map(wrap, clipped))


def _actor_critic(critic_tx: Any, actor_tx: Any) -> Built:

    def critic_loss(critic: Any, target: Any, actor: Any, batch: Any) -> jax.Array:
        value = mlp(target, jnp.tanh(batch["x"])).mean(axis=-1)
        wanted = 0.9 * value + mlp(actor, batch["x"]).max(axis=-1)
        off = mlp(critic, batch["x"]).mean(axis=-1) - jax.lax.stop_gradient(wanted)
        return jnp.square(off).mean()

    def actor_loss(actor: Any, critic: Any, batch: Any) -> jax.Array:
        action = jnp.tanh(mlp(actor, batch["x"])).sum(axis=-1, keepdims=True)
        return -mlp(critic, batch["x"] * action).mean()

    def step(state: State, batch: Any) -> tuple[State, Any]:
        critic, actor = state["critic"], state["actor"]
        of_critic, grads = jax.value_and_grad(critic_loss)(
            critic["params"], state["target"], actor["params"], batch
        )
        critic = updated(critic_tx, critic, grads)
        of_actor, grads = jax.value_and_grad(actor_loss)(actor["params"], critic["params"], batch)
        actor = updated(actor_tx, actor, grads)
        target = averaged(state["target"], critic["params"])
        after = {"critic": critic, "actor": actor, "target": target}
        return after, {"critic": of_critic, "actor": of_actor}

    critic, actor = started(critic_tx, net(1)), started(actor_tx, net(2))
    return Built({"critic": critic, "actor": actor, "target": net(1)}, step, labelled)


def build_ppo(wrap: Wrap) -> Built:
    """Builds two epochs over parts of the batch, by scans around the update."""
    tx = wrap(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)

        def once(state: State, part: Any) -> tuple[State, jax.Array]:
            value, grads = jax.value_and_grad(cross_entropy)(state["params"], part)
            return updated(tx, state, grads), value

        def epoch(state: State, _: None) -> tuple[State, jax.Array]:
            return jax.lax.scan(once, state, parts)

        state, values = jax.lax.scan(epoch, state, None, length=2)
        return state, {"loss": values.mean()}

    return Built(started(tx, net()), step, labelled)


def build_two_updates(wrap: Wrap) -> Built:
    """Builds two consecutive updates on the same batch."""
    tx = wrap(optax.adam(1e-2))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        values = []
        for _ in range(2):
            value, grads = jax.value_and_grad(cross_entropy)(state["params"], batch)
            state = updated(tx, state, grads)
            values.append(value)
        return state, {"loss": jnp.stack(values)}

    return Built(started(tx, net()), step, labelled)


def build_early_stop(wrap: Wrap) -> Built:
    """Builds an update that is skipped if the loss is small, in a branch."""
    tx = wrap(optax.adam(1e-2))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(cross_entropy)(state["params"], batch)
        new = jax.lax.cond(value > 0.5, lambda: updated(tx, state, grads), lambda: state)
        return new, {"loss": value}

    return Built(started(tx, net()), step, labelled)


PROGRAMS: dict[str, Callable[[Wrap], Built]] = {
    "dqn": build_dqn,
    "actor_critic": build_actor_critic,
    "clipped_actor_critic": build_clipped_actor_critic,
    "ppo": build_ppo,
    "two_updates": build_two_updates,
    "early_stop": build_early_stop,
}

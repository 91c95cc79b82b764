"""Agents that act and plan: entropies, quantiles, returns by scans, rollouts inside a step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.gallery.parts import Spread, State, averaged, net, started, updated
from tests.zoo import Built
from tests.zoo.base import Wrap
from tests.zoo.data import CLASSES, FEATURES, generator, labelled
from tests.zoo.layers import init_matrix, init_mlp, mlp

STEPS = 6  # of a trajectory


def trajectories(step: int, rows: int) -> dict[str, Any]:
    """Makes observations, actions and rewards over several steps, examples first."""
    random = generator(81, step)
    return {
        "seen": random.standard_normal((rows, STEPS, FEATURES)).astype(np.float32),
        "done": random.integers(0, CLASSES, (rows, STEPS)).astype(np.int32),
        "paid": random.standard_normal((rows, STEPS)).astype(np.float32),
        "go_on": (random.uniform(size=(rows, STEPS)) < 0.9).astype(np.float32),
        "log_p": np.log(random.uniform(0.1, 0.9, (rows, STEPS))).astype(np.float32),
    }


def policy() -> dict[str, Any]:
    return {"trunk": net(1, 8), "act": init_matrix(2, 8, CLASSES), "value": init_matrix(3, 8, 1)}


def acted(params: Any, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the scores of actions, and the value."""
    h = jnp.tanh(mlp(params["trunk"], seen))
    return h @ params["act"], (h @ params["value"])[..., 0]


def build_soft_actor(wrap: Wrap) -> Built:
    """Builds brax's SAC: actor, two critics and a temperature, each with its optimizer."""
    txs = {name: wrap(optax.adam(3e-3)) for name in ("actor", "critics", "alpha")}
    sizes = (FEATURES + 2, 8, 1)
    critics: Any = {"one": init_mlp(2, sizes), "two": init_mlp(3, sizes)}
    started_at: dict[str, Any] = {
        "actor": init_mlp(1, (FEATURES, 8, 4)),
        "critics": critics,
        "alpha": jnp.zeros(()),
    }

    def act(actor: Any, seen: jax.Array, key: Any) -> tuple[jax.Array, jax.Array]:
        mean, log_std = jnp.split(mlp(actor, seen), 2, axis=-1)
        noise = jax.random.normal(key, mean.shape)
        raw = mean + jnp.exp(log_std) * noise
        log_p = (
            -0.5 * jnp.square(noise)
            - log_std
            - 2 * (jnp.log(2.0) - raw - jax.nn.softplus(-2 * raw))
        )
        return jnp.tanh(raw), log_p.sum(-1)

    def judged(critics: Any, seen: jax.Array, action: jax.Array) -> jax.Array:
        both = jnp.concatenate([seen, action], axis=-1)
        return jnp.stack([mlp(critic, both)[:, 0] for critic in critics.values()])

    def step(state: State, batch: Any) -> tuple[State, Any]:
        key, *drawing = jax.random.split(state["key"], 4)
        seen, new_seen = batch["seen"][:, 0], batch["seen"][:, 1]
        actor, alpha = state["actor"]["params"], jnp.exp(state["alpha"]["params"])
        played = jnp.tanh(seen[:, :2])

        def critic_loss(critics: Any) -> jax.Array:
            action, log_p = act(actor, new_seen, drawing[0])
            later = judged(state["target"], new_seen, action).min(axis=0) - alpha * log_p
            wanted = batch["paid"][:, 0] + 0.9 * batch["go_on"][:, 0] * later
            return jnp.square(judged(critics, seen, played) - jax.lax.stop_gradient(wanted)).mean()

        def actor_loss(actor: Any) -> jax.Array:
            action, log_p = act(actor, seen, drawing[1])
            critics = state["critics"]["params"]
            return (alpha * log_p - judged(critics, seen, action).min(axis=0)).mean()

        def alpha_loss(log_alpha: jax.Array) -> jax.Array:
            _, log_p = act(actor, seen, drawing[2])
            return -(jnp.exp(log_alpha) * jax.lax.stop_gradient(log_p - 1.0)).mean()

        losses = {"critics": critic_loss, "actor": actor_loss, "alpha": alpha_loss}
        new, values = {}, {}
        for name, loss in losses.items():
            values[name], grads = jax.value_and_grad(loss)(state[name]["params"])
            new[name] = updated(txs[name], state[name], grads)
        target = averaged(state["target"], new["critics"]["params"], 0.05)
        return {**new, "target": target, "key": key}, values

    state: dict[str, Any] = {name: started(tx, started_at[name]) for name, tx in txs.items()}
    state |= {"target": critics, "key": jax.random.key(9)}
    return Built(state, step, trajectories)


class Training(NamedTuple):
    """The state of a learner as in acme."""

    params: Any
    target_params: Any
    opt_state: Any
    steps: Any
    random_key: Any


def build_quantiles(wrap: Wrap) -> Built:
    """Builds acme's QR-DQN learner: quantiles of returns, a target by cond, priorities."""
    tx = wrap(optax.chain(optax.clip_by_global_norm(40.0), optax.adam(1e-2, eps=1e-4)))
    params = init_mlp(4, (FEATURES, 8, CLASSES * 4))

    def values(params: Any, seen: jax.Array) -> jax.Array:
        return mlp(params, seen).reshape(-1, CLASSES, 4)

    def step(state: Training, batch: Any) -> tuple[Training, Any]:
        key, _ = jax.random.split(state.random_key)

        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            rows = jnp.arange(batch["paid"].shape[0])
            now = values(params, batch["seen"][:, 0])[rows, batch["done"][:, 0]]
            later = values(state.target_params, batch["seen"][:, 1])
            best = values(params, batch["seen"][:, 1]).mean(-1).argmax(-1)
            wanted = batch["paid"][:, :1] + 0.9 * batch["go_on"][:, :1] * later[rows, best]
            apart = jax.lax.stop_gradient(wanted)[:, None, :] - now[:, :, None]
            middle = (jnp.arange(4) + 0.5) / 4
            weight = jnp.abs(middle[:, None] - (apart < 0))
            each = (weight * optax.huber_loss(apart)).sum(axis=1).mean(axis=-1)
            importance = 1.0 / (0.1 + jnp.abs(batch["log_p"][:, 0]))
            importance = importance / importance.max()
            return (importance * each).mean(), jnp.abs(apart).mean(axis=(1, 2))

        (value, priorities), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        steps = state.steps + 1
        target = jax.lax.cond(
            steps % 2 == 0, lambda _: params, lambda old: old, state.target_params
        )
        new = Training(params, target, opt_state, steps, key)
        return new, {"loss": value, "priorities": priorities}

    state = Training(params, params, tx.init(params), jnp.zeros((), jnp.int32), jax.random.key(1))
    return Built(state, step, trajectories)


def build_traces(wrap: Wrap) -> Built:
    """Builds rlax's IMPALA: corrected returns by a scan back in time, time first inside a vmap."""
    tx = wrap(optax.chain(optax.clip_by_global_norm(40.0), optax.rmsprop(1e-2, decay=0.99)))

    def corrected(values: Any, paid: Any, go_on: Any, ratio: Any) -> tuple[jax.Array, jax.Array]:
        clipped = jnp.minimum(1.0, ratio)
        later = jnp.append(values[1:], values[-1])
        deltas = clipped * (paid + 0.9 * go_on * later - values)

        def once(carry: jax.Array, now: Any) -> Any:
            delta, go_on, clipped = now
            carry = delta + 0.9 * go_on * clipped * carry
            return carry, carry

        start = jnp.zeros(())
        _, errors = jax.lax.scan(once, start, (deltas, go_on, clipped), reverse=True)
        targets = errors + values
        return targets, clipped * (
            paid + 0.9 * go_on * jnp.append(targets[1:], values[-1]) - values
        )

    def loss(params: Any, batch: Any) -> jax.Array:
        scores, values = acted(params, batch["seen"])
        log_p = jax.nn.log_softmax(scores)
        of_done = jnp.take_along_axis(log_p, batch["done"][..., None], axis=-1)[..., 0]
        ratio = jnp.exp(of_done - batch["log_p"])
        targets, advantages = jax.vmap(corrected)(values, batch["paid"], batch["go_on"], ratio)
        targets, advantages = jax.lax.stop_gradient((targets, advantages))
        entropy = -(jnp.exp(log_p) * log_p).sum(-1)
        of_value = 0.5 * jnp.square(targets - values)
        return (-of_done * advantages + 0.5 * of_value - 0.01 * entropy).sum(axis=1).mean()

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, policy()), step, trajectories)


def build_time_first(wrap: Wrap) -> Built:
    """Builds generalized advantages on time-first arrays, as PureJaxRL's scans return them."""
    tx = wrap(optax.adam(1e-2))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        batch = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), batch)

        def loss(params: Any) -> jax.Array:
            scores, values = acted(params, batch["seen"])

            def once(carry: Any, now: Any) -> Any:
                advantage, later = carry
                value, paid, go_on = now
                delta = paid + 0.9 * later * go_on - value
                advantage = delta + 0.9 * 0.95 * go_on * advantage
                return (advantage, value), advantage

            fixed = jax.lax.stop_gradient(values)
            start = (jnp.zeros_like(fixed[-1]), fixed[-1])
            _, advantages = jax.lax.scan(
                once, start, (fixed, batch["paid"], batch["go_on"]), reverse=True, unroll=2
            )
            targets = advantages + fixed
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            log_p = jax.nn.log_softmax(scores)
            of_done = jnp.take_along_axis(log_p, batch["done"][..., None], axis=-1)[..., 0]
            return -(of_done * advantages).mean() + 0.5 * jnp.square(values - targets).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, policy()), step, trajectories)


def build_planner(wrap: Wrap) -> Built:
    """Builds MuZero's loss: a learned model unrolled over the actions, gradients halved."""
    tx = wrap(optax.adamw(1e-2, weight_decay=1e-4))
    params = {
        "see": init_mlp(1, (FEATURES, 8)),
        "move": init_mlp(2, (8 + CLASSES, 8, 9)),
        "judge": init_mlp(3, (8, CLASSES + 1)),
    }

    def of_one(params: Any, example: Any) -> jax.Array:
        h = jnp.tanh(mlp(params["see"], example["seen"][0]))

        def once(h: jax.Array, now: Any) -> Any:
            done, paid = now
            scores, value = jnp.split(mlp(params["judge"], h), [CLASSES])
            moved = mlp(params["move"], jnp.concatenate([h, jax.nn.one_hot(done, CLASSES)]))
            new, reward = moved[:8], moved[8]
            loss = optax.softmax_cross_entropy_with_integer_labels(scores, done)
            loss = loss + jnp.square(reward - paid) + 0.25 * jnp.square(value[0] - paid)
            new = (new - new.min()) / (new.max() - new.min() + 1e-5)
            return 0.5 * new + 0.5 * jax.lax.stop_gradient(new), loss

        _, losses = jax.lax.scan(once, h, (example["done"], example["paid"]))
        return losses.mean()

    def step(state: State, batch: Any) -> tuple[State, Any]:
        def loss(params: Any) -> jax.Array:
            return jax.vmap(of_one, in_axes=(None, 0))(params, batch).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, params), step, trajectories)


def build_rollouts(wrap: Wrap) -> Built:
    """Builds brax's APG: the gradient through an environment that the step itself runs."""
    tx = wrap(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
    params = init_mlp(7, (FEATURES + 2, 8, 3))
    world = 0.3 * init_matrix(8, 3, FEATURES)

    def train_step(params: Any, opt_state: Any, where: Any, rng: Any) -> Any:
        def run(params: Any, where: jax.Array, key: Any) -> jax.Array:
            def once(carry: Any, now: jax.Array) -> Any:
                where, key = carry
                key, drawing = jax.random.split(key)
                noise = 0.1 * jax.random.normal(drawing, (2,))
                force = jnp.tanh(mlp(params, jnp.concatenate([where, noise])))
                where = where + 0.1 * jnp.sin(where) + force @ world
                return (where, key), -jnp.square(where).mean() - 0.01 * now * jnp.square(
                    force
                ).sum()

            _, paid = jax.lax.scan(once, (where, key), jnp.arange(4.0))
            return paid.sum()

        def loss(params: Any) -> jax.Array:
            keys = jax.random.split(rng, where.shape[0])
            return -jax.vmap(run, in_axes=(None, 0, 0))(params, where, keys).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"reward": -value}

    def batch(number: int, rows: int) -> Any:
        return labelled(number, rows)["x"], jax.random.PRNGKey(number)

    return Spread((params, tx.init(params)), train_step, batch)


def build_random_target(wrap: Wrap) -> Built:
    """Builds RND: the error of a net about a random one is a reward, scaled by running moments."""
    tx = wrap(optax.adam(1e-2))
    params, target = net(3), net(4)

    def step(state: State, batch: Any) -> tuple[State, Any]:
        seen = batch["seen"].reshape(-1, FEATURES)

        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            wanted = jax.lax.stop_gradient(mlp(state["target"], seen))
            each = jnp.square(mlp(params, seen) - wanted).mean(-1)
            return each.mean(), each

        (value, bonus), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        count = state["count"] + bonus.shape[0]
        apart = bonus.mean() - state["mean"]
        mean = state["mean"] + apart * bonus.shape[0] / count
        square = state["square"] + bonus.var() * bonus.shape[0]
        moments = {"count": count, "mean": mean, "square": square}
        scaled = bonus.reshape(batch["paid"].shape) / jnp.sqrt(square / count + 1e-8)
        return {**updated(tx, state, grads), **moments}, {"loss": value, "bonus": scaled}

    moments = {"count": jnp.float32(1e-4), "mean": jnp.zeros(()), "square": jnp.ones(())}
    return Built(started(tx, params, target=target, **moments), step, trajectories)


PROGRAMS: dict[str, Callable[[Wrap], Built]] = {
    "soft_actor": build_soft_actor,
    "quantiles": build_quantiles,
    "traces": build_traces,
    "time_first": build_time_first,
    "planner": build_planner,
    "rollouts": build_rollouts,
    "random_target": build_random_target,
}

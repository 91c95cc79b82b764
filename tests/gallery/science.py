"""Physics, graphs and statistics: derivatives of nets, solvers, sums over edges, populations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.gallery.parts import Spread, State, cross_entropy, net, started, updated
from tests.zoo import Built
from tests.zoo.base import Wrap
from tests.zoo.data import CLASSES, FEATURES, generator, labelled, regression, signals
from tests.zoo.layers import init_matrix, init_mlp, mlp


def points(step: int, rows: int) -> dict[str, Any]:
    """Makes positions and times inside a domain, and positions at its boundary."""
    random = generator(51, step)
    inside = random.uniform(0, 1, (rows, 2)).astype(np.float32)
    return {"inside": inside, "edge": random.uniform(0, 1, rows).astype(np.float32)}


def build_physics_informed(wrap: Wrap) -> Built:
    """Builds jaxpi's loss: derivatives by position and time, weights by the norms of gradients."""
    tx = wrap(optax.adam(optax.exponential_decay(1e-2, 5, 0.9)))

    def u(params: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        return mlp(params, jnp.stack([x, t]))[0]

    def residual(params: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        u_t = jax.grad(u, argnums=2)(params, x, t)
        u_x = jax.grad(u, argnums=1)(params, x, t)
        u_xx = jax.grad(jax.grad(u, argnums=1), argnums=1)(params, x, t)
        return u_t + u(params, x, t) * u_x - 0.05 * u_xx

    def losses(params: Any, batch: Any) -> dict[str, jax.Array]:
        over = jax.vmap(residual, in_axes=(None, 0, 0))
        r = over(params, batch["inside"][:, 0], batch["inside"][:, 1])
        start = jax.vmap(u, in_axes=(None, 0, None))(params, batch["edge"], jnp.zeros(()))
        wanted = -jnp.sin(jnp.pi * batch["edge"])
        return {"start": jnp.square(start - wanted).mean(), "inside": jnp.square(r).mean()}

    def step(state: State, batch: Any) -> tuple[State, Any]:
        def weighed(params: Any) -> jax.Array:
            found = losses(params, batch)
            return sum(state["weights"][name] * found[name] for name in found)

        value, grads = jax.value_and_grad(weighed)(state["params"])
        each = jax.jacrev(losses)(state["params"], batch)
        norms = {name: optax.tree.norm(each[name]) for name in each}
        mean = sum(norms.values()) / len(norms)
        fresh = {name: mean / (norm + 1e-5) for name, norm in norms.items()}
        weights = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["weights"], fresh)
        return {**updated(tx, state, grads), "weights": weights}, {"loss": value}

    weights = {"start": jnp.ones(()), "inside": jnp.ones(())}
    return Built(started(tx, init_mlp(1, (2, 8, 1)), weights=weights), step, points)


def build_neural_ode(wrap: Wrap) -> Built:
    """Builds a neural ODE: Runge-Kutta steps in a scan with a gradient through it."""
    tx = wrap(optax.chain(optax.clip_by_global_norm(1.0), optax.amsgrad(1e-2)))
    field = init_mlp(1, (3, 8, 3))

    def slope(params: Any, y: jax.Array) -> jax.Array:
        return jnp.tanh(mlp(params, y))

    @jax.checkpoint
    def once(params: Any, y: jax.Array) -> jax.Array:
        h = 0.1
        k1 = slope(params, y)
        k2 = slope(params, y + h / 2 * k1)
        k3 = slope(params, y + h / 2 * k2)
        k4 = slope(params, y + h * k3)
        return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def path(params: Any, start: jax.Array) -> jax.Array:
        def body(y: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            return (new := once(params, y)), new

        return jax.lax.scan(body, start, None, length=7)[1]

    def loss(params: Any, batch: Any) -> jax.Array:
        found = jax.vmap(partial(path, params))(batch["x"][:, 0])
        return jnp.square(found - batch["x"][:, 1:]).mean()

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, field), step, signals)


def build_adaptive_solver(wrap: Wrap) -> Built:
    """Builds an ODE solver with error-adapted steps, each example until its end."""
    tx = wrap(optax.adam(1e-2))

    def solve(params: Any, y: jax.Array) -> jax.Array:
        def body(_: Any, carry: Any) -> Any:
            t, h, y = carry
            k1 = jnp.tanh(mlp(params, y))
            k2 = jnp.tanh(mlp(params, y + h * k1))
            new, error = y + h / 2 * (k1 + k2), jnp.abs(h / 2 * (k2 - k1)).max()
            good = (error < 0.02) & (t < 1.0)
            factor = jnp.clip(0.9 * jnp.sqrt(0.02 / (error + 1e-9)), 0.3, 2.0)
            t, y = jnp.where(good, t + h, t), jnp.where(good, new, y)
            return t, jnp.minimum(h * jax.lax.stop_gradient(factor), 1.0 - t + 1e-6), y

        return jax.lax.fori_loop(0, 6, body, (0.0, 0.3, y))[2]

    def loss(params: Any, batch: Any) -> jax.Array:
        ends = jax.vmap(partial(solve, params))(batch["x"][:, 0])
        return jnp.square(ends - batch["x"][:, -1]).mean()

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, init_mlp(2, (3, 8, 3))), step, signals)


def atoms(step: int, rows: int) -> dict[str, Any]:
    """Makes positions of five atoms in a box, an energy, and a force on each."""
    random = generator(61, step)
    where = random.uniform(0, 3, (rows, 5, 3)).astype(np.float32)
    return {
        "where": where,
        "energy": random.standard_normal(rows).astype(np.float32),
        "force": random.standard_normal((rows, 5, 3)).astype(np.float32),
    }


def build_potential(wrap: Wrap) -> Built:
    """Builds a jax-md potential: energies of pairs, forces as their gradient, a loss on both."""
    tx = wrap(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)))
    params = init_mlp(3, (4, 8, 1))

    def energy(params: Any, where: jax.Array) -> jax.Array:
        apart = where[:, None] - where[None]
        apart = jnp.mod(apart + 1.5, 3.0) - 1.5
        squares = jnp.square(apart).sum(-1) + jnp.eye(where.shape[0])
        radial = jnp.exp(-jnp.square(jnp.sqrt(squares)[..., None] - jnp.arange(1.0, 5.0) / 2))
        pairs = mlp(params, radial)[..., 0] * (1 - jnp.eye(where.shape[0]))
        return pairs.sum() / 2

    def loss(params: Any, batch: Any) -> jax.Array:
        found, slopes = jax.vmap(jax.value_and_grad(energy, argnums=1), (None, 0))(
            params, batch["where"]
        )
        of_force = jnp.square(-slopes - batch["force"]).sum((1, 2)).mean()
        return jnp.square(found - batch["energy"]).mean() + 0.1 * of_force

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, params), step, atoms)


def build_hamiltonian(wrap: Wrap) -> Built:
    """Builds a Hamiltonian net: a learned energy's slopes are the motion, by leapfrog."""
    tx = wrap(optax.yogi(1e-2))
    params = init_mlp(5, (4, 8, 1))

    def energy(params: Any, q: jax.Array, p: jax.Array) -> jax.Array:
        return mlp(params, jnp.concatenate([q, p]))[0] + 0.5 * jnp.vdot(p, p)

    def motion(params: Any, x: jax.Array) -> jax.Array:
        def body(_: Any, carry: Any) -> Any:
            q, p = carry
            p = p - 0.05 * jax.grad(energy, argnums=1)(params, q, p)
            q = q + 0.1 * jax.grad(energy, argnums=2)(params, q, p)
            return q, p - 0.05 * jax.grad(energy, argnums=1)(params, q, p)

        return jnp.concatenate(jax.lax.fori_loop(0, 3, body, (x[:2], x[2:])))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        x, wanted = batch["x"][:, :4], batch["x"][:, 4:8]

        def loss(params: Any) -> jax.Array:
            return jnp.abs(jax.vmap(motion, (None, 0))(params, x) - wanted).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, params), step, regression)


def graphs(step: int, rows: int) -> dict[str, Any]:
    """Makes graphs of six nodes and ten edges each, padded, and a class for each."""
    random = generator(71, step)
    return {
        "nodes": random.standard_normal((rows, 6, 4)).astype(np.float32),
        "senders": random.integers(0, 6, (rows, 10)).astype(np.int32),
        "receivers": random.integers(0, 6, (rows, 10)).astype(np.int32),
        "label": random.integers(0, 2, rows).astype(np.int32),
    }


def graph_scores(params: Any, nodes: Any, senders: Any, receivers: Any) -> jax.Array:
    """Returns the scores of one graph after two rounds of messages."""
    for number in range(2):
        pair = jnp.concatenate([nodes[senders], nodes[receivers]], axis=-1)
        messages = jax.nn.relu(mlp(params[f"edge{number}"], pair))
        weights = jnp.exp(messages[:, 0])
        total = jax.ops.segment_sum(weights, receivers, num_segments=nodes.shape[0])
        share = weights / (total[receivers] + 1e-6)
        came = jax.ops.segment_sum(share[:, None] * messages, receivers, nodes.shape[0])
        nodes = nodes + mlp(params[f"node{number}"], came)
    return nodes.mean(axis=0) @ params["out"]


def graph_params() -> dict[str, Any]:
    edges = {f"edge{n}": init_mlp(n, (8, 6)) for n in range(2)}
    return {
        **edges,
        **{f"node{n}": init_mlp(5 + n, (6, 4)) for n in range(2)},
        "out": init_matrix(9, 4, 2),
    }


def build_graphs(wrap: Wrap) -> Built:
    """Builds a jraph-like net over graphs of one padded size, each by vmap."""
    tx = wrap(optax.adam(1e-2))

    def loss(params: Any, batch: Any) -> jax.Array:
        scores = jax.vmap(graph_scores, in_axes=(None, 0, 0, 0))(
            params, batch["nodes"], batch["senders"], batch["receivers"]
        )
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"]).mean()

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, graph_params()), step, graphs)


def build_joined_graphs(wrap: Wrap) -> Built:
    """Builds jraph's own batches: nodes and edges of all graphs in one list each."""
    tx = wrap(optax.adam(1e-2))

    def loss(params: Any, batch: Any) -> jax.Array:
        scores = graph_scores(params, batch["nodes"], batch["senders"], batch["receivers"])
        return jnp.square(scores - batch["wanted"]).mean()

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return updated(tx, state, grads), {"loss": value}

    def batch(number: int, rows: int) -> Any:
        made = graphs(number, rows)
        first = 6 * np.arange(rows, dtype=np.int32)[:, None]
        ends = {name: (made[name] + first).reshape(-1) for name in ("senders", "receivers")}
        return {**ends, "nodes": made["nodes"].reshape(-1, 4), "wanted": np.ones(2, np.float32)}

    return Built(started(tx, graph_params()), step, batch)


def build_gaussian_process(wrap: Wrap) -> Built:
    """Builds GPJax's marginal likelihood: a Cholesky factor over all examples."""
    tx = wrap(optax.adam(1e-2))
    params = {"length": jnp.zeros(()), "scale": jnp.zeros(()), "noise": jnp.float32(-1.0)}

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"] / jnp.exp(params["length"]) / FEATURES**0.5
        squares = jnp.square(x[:, None] - x[None]).sum(-1)
        kernel = jnp.exp(2 * params["scale"] - 0.5 * squares)
        kernel = kernel + jnp.exp(2 * params["noise"]) * jnp.eye(x.shape[0])
        factor = jnp.linalg.cholesky(kernel)
        white = jax.scipy.linalg.solve_triangular(factor, batch["y"], lower=True)
        return 0.5 * jnp.vdot(white, white) + jnp.log(jnp.diagonal(factor)).sum()

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, params), step, regression)


def build_fixed_point(wrap: Wrap) -> Built:
    """Builds jaxopt's implicit layer: iterates to a fixed point, and differentiates there."""
    tx = wrap(optax.adamax(1e-2))
    params = {"w": 0.3 * init_matrix(1, 6, 6), "in": init_matrix(2, FEATURES, 6),
              "out": init_matrix(3, 6, CLASSES)}  # fmt: skip

    def once(params: Any, x: jax.Array, z: jax.Array) -> jax.Array:
        return jnp.tanh(z @ params["w"] + x @ params["in"])

    @jax.custom_vjp
    def fixed(params: Any, x: jax.Array) -> jax.Array:
        start = jnp.zeros((x.shape[0], 6))

        def more(carry: Any) -> Any:
            old, new, count = carry
            return (jnp.abs(new - old).max() > 1e-6) & (count < 50)

        def body(carry: Any) -> Any:
            _, z, count = carry
            return z, once(params, x, z), count + 1

        return jax.lax.while_loop(more, body, (start, once(params, x, start), 0))[1]

    def forward(params: Any, x: jax.Array) -> Any:
        z = fixed(params, x)
        return z, (params, x, z)

    def backward(kept: Any, g: jax.Array) -> Any:
        params, x, z = kept
        _, by_z = jax.vjp(lambda z: once(params, x, z), z)
        u = jax.lax.fori_loop(0, 10, lambda _, u: g + by_z(u)[0], g)
        _, by_both = jax.vjp(lambda params, x: once(params, x, z), params, x)
        return by_both(u)

    fixed.defvjp(forward, backward)

    def step(state: State, batch: Any) -> tuple[State, Any]:
        def loss(params: Any) -> jax.Array:
            scores = fixed(params, batch["x"]) @ params["out"]
            return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, params), step, labelled)


def build_evolution(wrap: Wrap) -> Built:
    """Builds evosax's OpenES: a population on the batch, ranks of its losses, no gradient."""
    tx = wrap(optax.adam(1e-2))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        key, drawing = jax.random.split(state["key"])
        flat, unflatten = jax.flatten_util.ravel_pytree(state["params"])
        half = jax.random.normal(drawing, (4, flat.size))
        noise = jnp.concatenate([half, -half])

        def of_one(noise: jax.Array) -> jax.Array:
            return cross_entropy(unflatten(flat + 0.1 * noise), batch)

        losses = jax.vmap(of_one)(noise)
        ranks = jnp.argsort(jnp.argsort(losses)) / (losses.size - 1) - 0.5
        grads = unflatten(noise.T @ ranks / (losses.size * 0.1))
        return {**updated(tx, state, grads), "key": key}, {"best": losses.min()}

    return Built(started(tx, net(), key=jax.random.key(6)), step, labelled)


def build_hypernetwork(wrap: Wrap) -> Built:
    """Builds a net that generates another one's weights from each example's context."""
    tx = wrap(optax.adamw(1e-2))
    sizes = (4 * 6, 6 * CLASSES)
    params = {"context": init_mlp(1, (8, 8, sum(sizes))), "start": 0.1 * jnp.ones(sum(sizes))}

    def scores(params: Any, x: jax.Array) -> jax.Array:
        made = params["start"] + mlp(params["context"], x[:8])
        first, last = made[: sizes[0]].reshape(4, 6), made[sizes[0] :].reshape(6, CLASSES)
        return jnp.tanh(x[8:] @ first) @ last

    def step(state: State, batch: Any) -> tuple[State, Any]:
        def loss(params: Any) -> jax.Array:
            found = jax.vmap(partial(scores, params))(batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(found, batch["y"]).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, params), step, labelled)


def build_ensemble(wrap: Wrap) -> Built:
    """Builds an ensemble: parameters, optimizer and step of four members under one vmap."""
    tx = wrap(optax.adam(1e-2))
    members = [init_mlp(seed, (FEATURES, 6, CLASSES)) for seed in range(4)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)

    def member(params: Any, opt: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(cross_entropy)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, value

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt = state
        params, opt, values = jax.vmap(member, in_axes=(0, 0, None))(params, opt, batch)
        return (params, opt), {"loss": values}

    return Built((stacked, jax.vmap(tx.init)(stacked)), step, labelled)


def build_rule_unmarked(wrap: Wrap) -> Built:
    """Builds learned_optimization: an update rule trained through two of its own steps."""
    return _learned(wrap, optax.identity())


def build_rule(wrap: Wrap) -> Built:
    """Builds the same, with the rule's gradients given to it by a wrapped optimizer."""
    return _learned(wrap, wrap(optax.identity()))


def _learned(wrap: Wrap, handed: Any) -> Built:
    tx = wrap(optax.chain(optax.clip(1.0), optax.adam(1e-3)))
    rule = init_mlp(4, (2, 4, 1))

    def moved(rule: Any, params: Any, momentum: Any, batch: Any) -> Any:
        grads = jax.grad(cross_entropy)(params, batch)
        grads, _ = handed.update(grads, optax.EmptyState(), params)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, momentum, grads)

        def of(x: jax.Array, m: jax.Array, g: jax.Array) -> jax.Array:
            return x - 0.1 * g - 0.01 * mlp(rule, jnp.stack([m, g], axis=-1))[..., 0]

        return jax.tree.map(of, params, momentum, grads), momentum

    def step(state: State, batch: Any) -> tuple[State, Any]:
        def after(rule: Any) -> tuple[jax.Array, Any]:
            inner = state["inner"], state["momentum"]
            for _ in range(2):
                inner = moved(rule, *inner, batch)
            return cross_entropy(inner[0], {**batch, "x": batch["x"][:, ::-1]}), inner

        (value, (inner, momentum)), grads = jax.value_and_grad(after, has_aux=True)(state["params"])
        return {**updated(tx, state, grads), "inner": inner, "momentum": momentum}, {"loss": value}

    zeros = jax.tree.map(jnp.zeros_like, net())
    return Built(started(tx, rule, inner=net(), momentum=zeros), step, labelled)


def build_tasks(wrap: Wrap) -> Built:
    """Builds a trunk with a head for each task; a switch selects the task of a step."""
    tx = wrap(optax.adam(1e-2))
    params = {"trunk": init_mlp(1, (FEATURES, 6)), "heads": [init_mlp(n, (6, CLASSES)) for n in (2, 3)]}  # fmt: skip  # noqa: E501

    def step(state: State, batch: Any) -> tuple[State, Any]:
        def of(head: int, params: Any) -> jax.Array:
            scores = mlp(params["heads"][head], jnp.tanh(mlp(params["trunk"], batch["x"])))
            if head:
                return jnp.square(scores).mean()
            return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean()

        def loss(params: Any) -> jax.Array:
            return jax.lax.switch(state["step"] % 2, [partial(of, n) for n in range(2)], params)

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {**updated(tx, state, grads), "step": state["step"] + 1}, {"loss": value}

    return Built(started(tx, params, step=jnp.zeros((), jnp.int32)), step, labelled)


def build_streams(wrap: Wrap) -> Built:
    """Builds Keras' stateless API: lists of trained values, statistics, slots and counts."""
    tx = wrap(optax.adam(1e-2))
    trained = [leaf for layer in net().values() for leaf in (layer["w"], layer["b"])]

    def call(trained: Any, seen: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        x = (x - seen[0]) / jnp.sqrt(seen[1] + 1e-3)
        new = [0.9 * seen[0] + 0.1 * x.mean(axis=0), 0.9 * seen[1] + 0.1 * x.var(axis=0)]
        return jnp.tanh(x @ trained[0] + trained[1]) @ trained[2] + trained[3], new

    def train_step(trained: Any, seen: Any, opt: Any, counts: Any, data: Any) -> Any:
        x, y = data

        def loss(trained: Any) -> Any:
            scores, new = call(trained, seen, x)
            return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean(), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(trained)
        updates, opt = tx.update(grads, opt, trained)
        counts = [counts[0] + value * x.shape[0], counts[1] + x.shape[0]]
        return value, optax.apply_updates(trained, updates), new, opt, counts

    seen = [jnp.zeros(FEATURES), jnp.ones(FEATURES)]
    state = (trained, seen, tx.init(trained), [jnp.zeros(()), jnp.zeros(())])

    def batch(number: int, rows: int) -> Any:
        made = labelled(number, rows)
        return ((made["x"], made["y"]),)

    return Spread(state, train_step, batch, before=1)


PROGRAMS: dict[str, Callable[[Wrap], Built]] = {
    "physics_informed": build_physics_informed,
    "neural_ode": build_neural_ode,
    "adaptive_solver": build_adaptive_solver,
    "potential": build_potential,
    "hamiltonian": build_hamiltonian,
    "graphs": build_graphs,
    "joined_graphs": build_joined_graphs,
    "gaussian_process": build_gaussian_process,
    "fixed_point": build_fixed_point,
    "evolution": build_evolution,
    "hypernetwork": build_hypernetwork,
    "ensemble": build_ensemble,
    "rule_unmarked": build_rule_unmarked,
    "rule": build_rule,
    "tasks": build_tasks,
    "streams": build_streams,
}

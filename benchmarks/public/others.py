"""Programs of many kinds: optimizers that use the loss, agents, images, clicks, experts."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from jax import lax

from public.program import ROWS, Program, TrainStep, Wrap, drawn, numbers, started, trained, updated

CONTRIB: Any = optax.contrib
IMAGE = (28, 28, 1)


def programs() -> list[Program]:
    return [
        _sam("SAM, two gradients", by_hand=True),
        _sam("SAM (optax, opaque)", opaque=True),
        _sam("SAM (optax)", opaque=False),
        _lbfgs(),
        _td3(),
        _sac(),
        _vae(),
        _lora(),
        _dlrm(),
        _siglip(),
        _experts(),
    ]


class CNN(linen.Module):
    """flax's mnist example."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.avg_pool(linen.relu(linen.Conv(16, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = linen.avg_pool(linen.relu(linen.Conv(32, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = linen.relu(linen.Dense(128)(x.reshape((x.shape[0], -1))))
        return linen.Dense(10)(x)


def _sam(name: str, *, opaque: bool = False, by_hand: bool = False) -> Program:
    model = CNN()
    batch = {"x": drawn(ROWS, *IMAGE), "y": numbers(10, ROWS)}
    params = model.init(jax.random.key(0), batch["x"][:1])
    ascent = optax.chain(CONTRIB.normalize(), optax.sgd(0.05))
    optimizer: Any = optax.sgd(0.01, momentum=0.9)
    if not by_hand:
        optimizer = CONTRIB.sam(optimizer, ascent, sync_period=2, opaque_mode=opaque)

    def loss(params: Any, batch: Any) -> jax.Array:
        scores = model.apply(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean()

    def make(wrap: Wrap) -> TrainStep:
        tx = wrap(optimizer)

        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            value, grads = jax.value_and_grad(loss)(state["params"], batch)
            if by_hand:
                norm = optax.global_norm(grads)
                worse = jax.tree.map(lambda p, g: p + 0.05 * g / norm, state["params"], grads)
                grads = jax.grad(loss)(worse, batch)
            extra = {"grad_fn": lambda p, _: jax.grad(loss)(p, batch)} if opaque else {}
            return updated(tx, state, grads, **extra), value

        return train_step

    return Program(name, make, started(optimizer, params), batch)


def _lbfgs() -> Program:
    batch = {"x": drawn(256, 64), "y": numbers(10, 256)}
    params = {"w": drawn(64, 64) / 8, "b": jnp.zeros(64), "out": drawn(64, 10) / 8}
    optimizer = optax.lbfgs()

    def loss(params: Any, batch: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
        scores = hidden @ params["out"]
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])
        return losses.mean() + 1e-3 * optax.global_norm(params) ** 2

    def make(wrap: Wrap) -> TrainStep:
        tx = wrap(optimizer)

        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            def of(params: Any) -> jax.Array:
                return loss(params, batch)

            from_state = optax.value_and_grad_from_state(of)
            value, grads = from_state(state["params"], state=state["opt"])
            return updated(tx, state, grads, value=value, grad=grads, value_fn=of), value

        return train_step

    return Program("L-BFGS", make, started(optimizer, params), batch)


class Net(linen.Module):
    """The nets of CleanRL's agents."""

    outputs: int
    wide: int = 256

    @linen.compact
    def __call__(self, *inputs: Any) -> Any:
        x = jnp.concatenate(inputs, -1)
        for _ in range(2):
            x = linen.relu(linen.Dense(self.wide)(x))
        return linen.Dense(self.outputs)(x)


SEEN, DONE = 17, 6  # of HalfCheetah


def _replayed() -> Any:
    rows = 256
    return {
        "seen": drawn(rows, SEEN, seed=1),
        "done": drawn(rows, DONE, seed=2),
        "next": drawn(rows, SEEN, seed=3),
        "reward": drawn(rows, seed=4),
        "ended": numbers(2, rows).astype("float32"),
    }


def _td3() -> Program:
    critic, actor, tx0 = Net(1), Net(DONE), optax.adam(3e-4)
    batch = _replayed()
    of_actor = actor.init(jax.random.key(0), batch["seen"])
    both = [critic.init(jax.random.key(n), batch["seen"], batch["done"]) for n in (1, 2)]

    def make(wrap: Wrap) -> TrainStep:
        txs = {name: wrap(tx0) for name in ("q1", "q2", "actor")}

        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            key, own = jax.random.split(state["key"])
            noise = jnp.clip(jax.random.normal(own, batch["done"].shape) * 0.2, -0.5, 0.5)
            wanted = jnp.tanh(actor.apply(state["targets"]["actor"], batch["next"]))
            then = jnp.clip(wanted + noise, -1, 1)
            values = [
                critic.apply(state["targets"][n], batch["next"], then)[:, 0] for n in ("q1", "q2")
            ]
            goal = batch["reward"] + (1 - batch["ended"]) * 0.99 * jnp.minimum(*values)
            goal = lax.stop_gradient(goal)

            def of_critic(params: Any) -> Any:
                value = critic.apply(params, batch["seen"], batch["done"])[:, 0]
                return jnp.square(value - goal).mean(), value.mean()

            new, metrics = {}, {}
            for name in ("q1", "q2"):
                found, grads = jax.value_and_grad(of_critic, has_aux=True)(state[name]["params"])
                new[name], metrics[name] = updated(txs[name], state[name], grads), found

            def of_policy(params: Any) -> jax.Array:
                done = jnp.tanh(actor.apply(params, batch["seen"]))
                return -critic.apply(new["q1"]["params"], batch["seen"], done).mean()

            metrics["actor"], grads = jax.value_and_grad(of_policy)(state["actor"]["params"])
            new["actor"] = updated(txs["actor"], state["actor"], grads)
            targets = {
                name: optax.incremental_update(new[name]["params"], state["targets"][name], 0.005)
                for name in new
            }
            return {**new, "targets": targets, "key": key}, metrics

        return train_step

    params = {"q1": both[0], "q2": both[1], "actor": of_actor}
    state = {name: started(tx0, leaf) for name, leaf in params.items()}
    return Program("TD3", make, {**state, "targets": params, "key": jax.random.PRNGKey(0)}, batch)


def _sac() -> Program:
    critic, actor, tx0 = Net(1), Net(2 * DONE), optax.adam(3e-4)
    batch = _replayed()
    of_actor = actor.init(jax.random.key(0), batch["seen"])
    both = jax.vmap(lambda key: critic.init(key, batch["seen"], batch["done"]))(
        jax.random.split(jax.random.key(1))
    )
    values_of: Any = jax.vmap(critic.apply, in_axes=(0, None, None))

    def sampled(params: Any, seen: Any, key: Any) -> tuple[Any, Any]:
        mean, spread = jnp.split(actor.apply(params, seen), 2, -1)
        spread = -5 + 0.5 * 7 * (jnp.tanh(spread) + 1)
        noise = jax.random.normal(key, mean.shape)
        done = jnp.tanh(mean + jnp.exp(spread) * noise)
        chance = -0.5 * noise**2 - spread - jnp.log(1 - done**2 + 1e-6)
        return done, chance.sum(-1)

    def make(wrap: Wrap) -> TrainStep:
        txs = {name: wrap(tx0) for name in ("critic", "actor", "alpha")}

        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            key, first, second = jax.random.split(state["key"], 3)
            alpha = jnp.exp(state["alpha"]["params"])
            then, chance = sampled(state["actor"]["params"], batch["next"], first)
            value = values_of(state["target"], batch["next"], then)[..., 0].min(0)
            goal = batch["reward"] + (1 - batch["ended"]) * 0.99 * (value - alpha * chance)

            def of_critic(params: Any) -> jax.Array:
                value = values_of(params, batch["seen"], batch["done"])[..., 0]
                return jnp.square(value - lax.stop_gradient(goal)).mean(1).sum()

            lost, grads = jax.value_and_grad(of_critic)(state["critic"]["params"])
            new = {"critic": updated(txs["critic"], state["critic"], grads)}

            def of_policy(params: Any) -> Any:
                done, chance = sampled(params, batch["seen"], second)
                value = values_of(new["critic"]["params"], batch["seen"], done)[..., 0].min(0)
                return (alpha * chance - value).mean(), -chance.mean()

            found = jax.value_and_grad(of_policy, has_aux=True)(state["actor"]["params"])
            (policy, entropy), grads = found
            new["actor"] = updated(txs["actor"], state["actor"], grads)
            temper, grad = jax.value_and_grad(lambda a: jnp.exp(a) * (entropy + DONE))(
                state["alpha"]["params"]
            )
            new["alpha"] = updated(txs["alpha"], state["alpha"], grad)
            target = optax.incremental_update(new["critic"]["params"], state["target"], 0.005)
            metrics = {"critic": lost, "actor": policy, "entropy": entropy, "alpha": temper}
            return {**new, "target": target, "key": key}, metrics

        return train_step

    params = {"critic": both, "actor": of_actor, "alpha": jnp.zeros(())}
    state = {name: started(tx0, leaf) for name, leaf in params.items()}
    return Program("SAC", make, {**state, "target": both, "key": jax.random.PRNGKey(0)}, batch)


class VAE(nnx.Module):
    """flax's nnx example of a variational autoencoder."""

    def __init__(self, rngs: nnx.Rngs, size: int = 784, wide: int = 256, code: int = 32) -> None:
        self.first = nnx.Linear(size, wide, rngs=rngs)
        self.mean = nnx.Linear(wide, code, rngs=rngs)
        self.spread = nnx.Linear(wide, code, rngs=rngs)
        self.back = nnx.Linear(code, wide, rngs=rngs)
        self.last = nnx.Linear(wide, size, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x: Any) -> Any:
        x = jax.nn.relu(self.first(x.reshape((x.shape[0], -1))))
        mean, spread = self.mean(x), jnp.exp(self.spread(x))
        divergence = jnp.mean(0.5 * jnp.mean(-jnp.log(spread**2) - 1 + spread**2 + mean**2, -1))
        z = mean + spread * jax.random.normal(self.rngs.noise(), mean.shape)
        return self.last(jax.nn.relu(self.back(z))), divergence


def _vae() -> Program:
    def loss(model: Any, x: Any) -> jax.Array:
        logits, divergence = model(x)
        target = (x > 0).astype(jnp.float32).reshape(logits.shape)
        return optax.sigmoid_binary_cross_entropy(logits, target).mean() + 0.1 * divergence

    model = VAE(nnx.Rngs(0, noise=1))
    return _nnx("VAE (nnx)", model, loss, drawn(ROWS, *IMAGE[:2]), nnx.Param)


def _nnx(name: str, model: Any, loss: Any, batch: Any, kind: Any) -> Program:
    optimizer = optax.adam(1e-3)
    state = nnx.state((model, nnx.Optimizer(model, optimizer, wrt=kind)))

    def make(wrap: Wrap) -> TrainStep:
        graph = nnx.graphdef((model, nnx.Optimizer(model, wrap(optimizer), wrt=kind)))

        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            model, optimizer = nnx.merge(graph, state)
            chosen = nnx.DiffState(0, kind)
            value, grads = nnx.value_and_grad(loss, argnums=chosen)(model, batch)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), value

        return train_step

    return Program(name, make, state, batch)


class Tuned(nnx.Module):
    """A frozen net with trained low-rank additions."""

    def __init__(self, rngs: nnx.Rngs, size: int = 128) -> None:
        self.layers = nnx.List([nnx.Linear(size, size, rngs=rngs) for _ in range(4)])
        self.added = nnx.List([nnx.LoRA(size, 4, size, rngs=rngs) for _ in range(4)])
        self.last = nnx.LoRALinear(size, 10, lora_rank=4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer, added in zip(self.layers, self.added, strict=True):
            x = jax.nn.relu(layer(x) + added(x))
        return self.last(x)


def _lora() -> Program:
    def loss(model: Any, batch: Any) -> jax.Array:
        scores = model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean()

    batch = {"x": drawn(ROWS, 128), "y": numbers(10, ROWS)}
    return _nnx("LoRA (nnx)", Tuned(nnx.Rngs(0)), loss, batch, nnx.LoRAParam)


def _dlrm() -> Program:
    tables, entries, size = 8, 1000, 16
    wide = (13, 64, size)
    params = {
        "tables": [drawn(entries, size, seed=n) / 4 for n in range(tables)],
        "bottom": [_dense(a, b) for a, b in itertools.pairwise(wide)],
        "top": [_dense(a, b) for a, b in ((36 + size, 64), (64, 1))],
    }
    batch = {
        "dense": drawn(ROWS * 4, 13),
        "ids": numbers(entries, ROWS * 4, tables),
        "label": numbers(2, ROWS * 4).astype("float32"),
    }

    def run(layers: Any, x: Any) -> Any:
        for layer in layers[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return x @ layers[-1]["w"] + layers[-1]["b"]

    def loss(params: Any, batch: Any) -> jax.Array:
        x = jax.nn.relu(run(params["bottom"], batch["dense"]))
        rows = [jnp.take(t, batch["ids"][:, n], axis=0) for n, t in enumerate(params["tables"])]
        all_rows = jnp.stack([x, *rows], axis=1)
        pairs = jnp.einsum("bnd,bmd->bnm", all_rows, all_rows)
        chosen = jnp.tril_indices(tables + 1, -1)
        scores = run(params["top"], jnp.concatenate([x, pairs[:, chosen[0], chosen[1]]], -1))
        return optax.sigmoid_binary_cross_entropy(scores[:, 0], batch["label"]).mean()

    return trained("DLRM", loss, params, batch, optax.adagrad(1e-2))


def _dense(inner: int, outer: int) -> Any:
    return {"w": drawn(inner, outer) / inner**0.5, "b": jnp.zeros(outer)}


def _siglip() -> Program:
    image, text = Net(64), Net(64)
    batch = {"image": drawn(ROWS, 192), "text": drawn(ROWS, 64)}
    params = {
        "image": image.init(jax.random.key(0), batch["image"]),
        "text": text.init(jax.random.key(1), batch["text"]),
        "t": jnp.array([2.3]),
        "b": jnp.array([-10.0]),
    }

    def unit(x: Any) -> Any:
        return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-8)

    def loss(params: Any, batch: Any) -> jax.Array:
        images = unit(image.apply(params["image"], batch["image"]))
        texts = unit(text.apply(params["text"], batch["text"]))
        logits = images @ texts.T * jnp.exp(params["t"]) + params["b"]
        signs = 2 * jnp.eye(logits.shape[0]) - 1
        return -jax.nn.log_sigmoid(signs * logits).sum(-1).mean()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return trained("SigLIP", loss, params, batch, optimizer)


def _experts() -> Program:
    """Top-2 routing with a capacity, as in GShard and Switch."""
    size, experts = 64, 4
    params = {
        "gate": drawn(size, experts) / 8,
        "up": drawn(experts, size, 2 * size) / 8,
        "down": drawn(experts, 2 * size, size) / 11,
        "last": drawn(size, 10) / 8,
    }
    batch = {"x": drawn(ROWS, 8, size), "y": numbers(10, ROWS)}
    capacity = 8

    def mixed(params: Any, x: Any) -> Any:
        chances = jax.nn.softmax(x @ params["gate"])
        best, chosen = lax.top_k(chances, 2)
        mask = jax.nn.one_hot(chosen, experts)
        place = jnp.cumsum(mask.sum(-2), axis=-2)[..., None, :] * mask - 1
        slots = jax.nn.one_hot(place, capacity) * (best[..., None] * mask)[..., None]
        combine = slots.sum(-3)
        dispatch = (combine > 0).astype(x.dtype)
        sent = jnp.einsum("btec,btd->becd", dispatch, x)
        hidden = jax.nn.relu(jnp.einsum("becd,edh->bech", sent, params["up"]))
        back = jnp.einsum("bech,ehd->becd", hidden, params["down"])
        balance = (mask.mean((0, 1, 2)) * chances.mean((0, 1))).sum()
        return jnp.einsum("btec,becd->btd", combine, back), balance

    def loss(params: Any, batch: Any) -> jax.Array:
        found, balance = mixed(params, batch["x"])
        scores = (batch["x"] + found).mean(1) @ params["last"]
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])
        return losses.mean() + 0.01 * balance

    return trained("mixture of experts", loss, params, batch, optax.adamw(1e-3))

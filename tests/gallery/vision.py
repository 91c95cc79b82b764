"""Pictures and views: contrastive losses, masks, classifiers with statistics, augmentations."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from tests.gallery.parts import Spread, averaged, cross_entropy, net, started, unit, updated
from tests.zoo import Built
from tests.zoo.base import Wrap
from tests.zoo.data import CLASSES, FEATURES, images, labelled
from tests.zoo.layers import init_flax, init_matrix, mlp


def views(key: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two views of each example: noise, and a random brightness."""
    one, two = jax.random.split(key)

    def view(key: Any) -> jax.Array:
        noisy = x + 0.1 * jax.random.normal(key, x.shape)
        return noisy * jax.random.uniform(key, (x.shape[0], 1), minval=0.8, maxval=1.2)

    return view(one), view(two)


def build_simclr(wrap: Wrap) -> Built:
    """Builds SimCLR: each of two views against all others of the batch, LARS without biases."""

    def matrices(params: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, params)

    tx = wrap(optax.lars(0.3, weight_decay=1e-6, weight_decay_mask=matrices))

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        z = unit(mlp(params, jnp.concatenate(views(key, batch["x"]))))
        scores = z @ z.T / 0.5
        rows = z.shape[0]
        scores = jnp.where(jnp.eye(rows, dtype=bool), -1e9, scores)
        partner = jnp.roll(jnp.arange(rows), rows // 2)
        return optax.softmax_cross_entropy_with_integer_labels(scores, partner).mean()

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        key, drawing = jax.random.split(state["key"])
        value, grads = jax.value_and_grad(loss)(state["params"], batch, drawing)
        return {**updated(tx, state, grads), "key": key}, {"loss": value}

    return Built(started(tx, net(), key=jax.random.key(1)), step, labelled)


def towers() -> dict[str, Any]:
    return {"image": net(1), "text": net(2), "scale": jnp.log(10.0), "bias": jnp.float32(-2.0)}


def build_clip(wrap: Wrap) -> Built:
    """Builds CLIP: two towers, a loss of both directions, a bounded scale."""
    tx = wrap(optax.adamw(1e-2, b2=0.98, weight_decay=0.2))

    def loss(params: Any, batch: Any) -> jax.Array:
        image, text = unit(mlp(params["image"], batch["x"])), unit(mlp(params["text"], -batch["x"]))
        scores = jnp.exp(params["scale"]) * image @ text.T
        labels = jnp.arange(scores.shape[0])
        of_both = [
            optax.softmax_cross_entropy_with_integer_labels(each, labels).mean()
            for each in (scores, scores.T)
        ]
        return (of_both[0] + of_both[1]) / 2

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        new = updated(tx, state, grads)
        scale = jnp.clip(new["params"]["scale"], 0, jnp.log(100.0))
        params = {**new["params"], "scale": scale}
        return {**new, "params": params}, {"loss": value, "scale": jnp.exp(scale)}

    return Built(started(tx, towers()), step, labelled)


def build_siglip(wrap: Wrap) -> Built:
    """Builds big_vision's SigLIP: every pair of image and text independently, under a sigmoid."""
    schedule = optax.cosine_decay_schedule(1.0, 20)
    tx = wrap(optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=4), optax.scale(-1e-2),
                          optax.scale_by_schedule(schedule)))  # fmt: skip

    def update_fn(params: Any, opt: Any, rng: Any, batch: Any) -> Any:
        rng, rng_model = jax.random.split(rng)

        def loss(params: Any) -> jax.Array:
            image, text = views(rng_model, batch["x"])
            image, text = unit(mlp(params["image"], image)), unit(mlp(params["text"], text))
            scores = jnp.exp(params["scale"]) * image @ text.T + params["bias"]
            wanted = 2 * jnp.eye(scores.shape[0]) - 1
            return -jax.nn.log_sigmoid(wanted * scores).sum(-1).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        norm = jnp.sqrt(sum(jnp.vdot(p, p) for p in jax.tree.leaves(params)))
        return params, opt, rng, value, {"l2_params": norm}

    state = (towers(), tx.init(towers()), jax.random.PRNGKey(2))
    return Spread(state, update_fn, lambda number, rows: (labelled(number, rows),))


def build_redundancy(wrap: Wrap) -> Built:
    """Builds Barlow Twins: the correlation over the batch of two views approaches the identity."""
    tx = wrap(optax.lamb(1e-2))

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        def normalized(view: jax.Array) -> jax.Array:
            z = jnp.tanh(mlp(params["net"], view)) @ params["last"]
            return (z - z.mean(axis=0)) / (z.std(axis=0) + 1e-3)

        one, two = map(normalized, views(key, batch["x"]))
        c = one.T @ two / one.shape[0]
        diagonal = jnp.diagonal(c)
        return jnp.square(1 - diagonal).sum() + 5e-3 * (jnp.square(c).sum() - (diagonal**2).sum())

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        key, drawing = jax.random.split(state["key"])
        value, grads = jax.value_and_grad(loss)(state["params"], batch, drawing)
        return {**updated(tx, state, grads), "key": key}, {"loss": value}

    params = {"net": net(), "last": init_matrix(5, CLASSES, 4)}
    return Built(started(tx, params, key=jax.random.key(4)), step, labelled)


def build_self_distillation(wrap: Wrap) -> Built:
    """Builds DINO: a teacher averaged by a schedule, its outputs centred by a mean."""
    tx = wrap(optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2, weight_decay=0.04))

    def loss(params: Any, teacher: Any, center: jax.Array, batch: Any) -> tuple[jax.Array, Any]:
        seen = jax.lax.stop_gradient(mlp(teacher, batch["x"]))
        target = jax.nn.softmax((seen - center) / 0.04)
        ours = jax.nn.log_softmax(mlp(params, 0.9 * batch["x"]) / 0.1)
        return -(target * ours).sum(-1).mean(), seen.mean(axis=0)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        at = state["step"]
        (value, mean), grads = jax.value_and_grad(loss, has_aux=True)(
            state["params"], state["teacher"], state["center"], batch
        )
        state["opt"].hyperparams["weight_decay"] = 0.04 + 0.01 * at
        new = updated(tx, state, grads)
        weight = 0.01 * (1 + jnp.cos(jnp.pi * at / 20))
        teacher = averaged(state["teacher"], new["params"], weight)
        center = 0.9 * state["center"] + 0.1 * mean
        return {**new, "teacher": teacher, "center": center, "step": at + 1}, {"loss": value}

    more = {"teacher": net(), "center": jnp.zeros(CLASSES), "step": jnp.zeros((), jnp.int32)}
    return Built(started(tx, net(), **more), step, labelled)


def build_masked_patches(wrap: Wrap) -> Built:
    """Builds MAE: patches in a random order, the first visible, the others reconstructed."""
    tx = wrap(optax.adamw(1e-2, b2=0.95))
    params = {
        "embed": init_matrix(1, 4, 8),
        "place": 0.1 * init_matrix(2, 16, 8),
        "mix": init_matrix(3, 8, 8),
        "mask": jnp.zeros(8),
        "out": init_matrix(4, 8, 4),
    }

    def train_step(params: Any, opt_state: Any, image: Any, rng: Any) -> Any:
        patches = image.reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 16, 4)

        def loss(params: Any) -> jax.Array:
            x = patches @ params["embed"] + params["place"]
            order = jnp.argsort(jax.random.uniform(rng, x.shape[:2]), axis=1)
            back = jnp.argsort(order, axis=1)
            seen = jnp.take_along_axis(x, order[:, :4, None], axis=1)
            seen = seen + jax.nn.softmax(seen @ seen.swapaxes(1, 2)) @ (seen @ params["mix"])
            unseen = jnp.broadcast_to(params["mask"], (x.shape[0], 12, 8))
            h = jnp.concatenate([seen, unseen], axis=1)
            h = jnp.take_along_axis(h, back[..., None], axis=1) + params["place"]
            each = jnp.square(jax.nn.gelu(h) @ params["out"] - patches).mean(-1)
            hidden = (back >= 4).astype(jnp.float32)
            return (each * hidden).sum() / hidden.sum()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": value}

    def batch(number: int, rows: int) -> Any:
        return images(number, rows)["image"][..., 0], jax.random.key(number)

    return Spread((params, tx.init(params)), train_step, batch)


class Block(nn.Module):
    """A residual net with normalization over the batch, and dropout."""

    @nn.compact
    def __call__(self, x: Any, *, train: bool) -> Any:
        x = nn.Conv(4, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        shortcut = x
        x = nn.Conv(4, (3, 3), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(x + shortcut).mean(axis=(1, 2))
        return nn.Dense(4)(nn.Dropout(0.2, deterministic=not train)(x))


class WithStatistics(TrainState):
    """A TrainState with running statistics and a key."""

    batch_stats: Any
    key: Any


def build_residual_net(wrap: Wrap) -> Built:
    """Builds scenic's classifier: BatchNorm, dropout by the step's key, weights in the loss."""
    tx = wrap(optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9)))
    model = Block()
    made = init_flax(model, jnp.zeros((2, 8, 8, 1)), train=False)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        key = jax.random.fold_in(state.key, state.step)

        def loss(params: Any) -> tuple[jax.Array, Any]:
            scores, new = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"],
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": key},
            )
            wanted = optax.smooth_labels(jax.nn.one_hot(batch["label"], 4), 0.1)
            penalty = sum(jnp.square(x).sum() for x in jax.tree.leaves(params) if x.ndim > 1)
            value = optax.softmax_cross_entropy(scores, wanted).mean() + 5e-5 * penalty
            return value, (new["batch_stats"], scores)

        (value, (stats, scores)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        accuracy = (scores.argmax(-1) == batch["label"]).mean()
        state = state.apply_gradients(grads=grads, batch_stats=stats)
        return state, {"loss": value, "accuracy": accuracy}

    state = WithStatistics.create(
        apply_fn=model.apply,
        params=made["params"],
        batch_stats=made["batch_stats"],
        tx=tx,
        key=jax.random.key(7),
    )
    return Built(state, step, images)


def build_mixup(wrap: Wrap) -> Built:
    """Builds big_vision's mixup: each example with the next one, by a random weight."""
    tx = wrap(optax.sgd(0.1, momentum=0.9, nesterov=True))

    def train_step(params: Any, opt_state: Any, batch: Any, rng: Any) -> Any:
        a = jax.random.beta(rng, 0.2, 0.2)
        a = jnp.maximum(a, 1.0 - a)

        def mixed(x: jax.Array) -> jax.Array:
            return a * x + (1.0 - a) * jnp.roll(x, 1, axis=0)

        def loss(params: Any) -> jax.Array:
            wanted = mixed(jax.nn.one_hot(batch["y"], CLASSES))
            scores = mlp(params, mixed(batch["x"]))
            return optax.softmax_cross_entropy(scores, wanted).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    state = (net(), tx.init(net()))
    return Spread(state, train_step, lambda n, r: (labelled(n, r), jax.random.PRNGKey(n)))


def build_pseudo_labels(wrap: Wrap) -> Built:
    """Builds FixMatch: confident classes of weak views are targets for strong views."""
    tx = wrap(optax.sgd(0.05, momentum=0.9, nesterov=True))

    def loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        guess = jax.nn.softmax(jax.lax.stop_gradient(mlp(params, batch["more"])))
        sure = guess.max(axis=-1) >= 0.4
        scores = mlp(params, 1.2 * batch["more"][..., ::-1])
        each = optax.softmax_cross_entropy_with_integer_labels(scores, guess.argmax(-1))
        return cross_entropy(params, batch) + (each * sure).mean(), sure.mean()

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        (value, sure), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], batch)
        new = updated(tx, state, grads)
        return {**new, "ema": averaged(state["ema"], new["params"])}, {"loss": value, "sure": sure}

    def batch(number: int, rows: int) -> Any:
        more = labelled(number + 50, 3 * rows)["x"].reshape(rows, 3, FEATURES)
        return {**labelled(number, rows), "more": more}

    return Built(started(tx, net(), ema=net()), step, batch)


class Classifier(nnx.Module):
    """Two layers with dropout between them, and a counter of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(FEATURES, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(8, CLASSES, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1.0
        return self.last(self.drop(nnx.gelu(self.first(x))))


def build_module(wrap: Wrap) -> Built:
    """Builds an NNX guide's step: module, optimizer and metrics are split, merged, and split."""
    rngs = nnx.Rngs(params=0, dropout=1)
    model = Classifier(rngs)
    tx = wrap(optax.adamw(1e-2))
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    graph, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param), metrics))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        model, optimizer, metrics = nnx.merge(graph, state)

        def loss(model: Any) -> Any:
            scores = model(batch["x"])
            losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])
            return losses.mean(), scores

        (value, scores), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        metrics.update(loss=value, logits=scores, labels=batch["y"])
        optimizer.update(model, grads)
        return nnx.state((model, optimizer, metrics)), {"loss": value}

    return Built(state, step, labelled)


def build_frozen_module(wrap: Wrap) -> Built:
    """Builds an NNX step that trains the last layer only, by a filter of its path."""
    model = Classifier(nnx.Rngs(params=3, dropout=4))
    tx = wrap(optax.sgd(0.1, momentum=0.9))
    trained = nnx.All(nnx.Param, nnx.PathContains("last"))
    graph, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=trained)))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        model, optimizer = nnx.merge(graph, state)

        def loss(model: Any) -> jax.Array:
            scores = model(batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean()

        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, trained))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {"loss": value}

    return Built(state, step, labelled)


PROGRAMS: dict[str, Callable[[Wrap], Built]] = {
    "simclr": build_simclr,
    "clip": build_clip,
    "siglip": build_siglip,
    "redundancy": build_redundancy,
    "self_distillation": build_self_distillation,
    "masked_patches": build_masked_patches,
    "residual_net": build_residual_net,
    "mixup": build_mixup,
    "pseudo_labels": build_pseudo_labels,
    "module": build_module,
    "frozen_module": build_frozen_module,
}

"""Steps that process gradients by hand: clipping, scaling, averaging, one row at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.base import Built, Wrap, case, updated
from tests.zoo.data import CLASSES, FEATURES, labelled
from tests.zoo.layers import Dense, init_mlp, mlp, row_losses

Net = dict[str, Dense]


def mean_loss(params: Net, batch: Any) -> jax.Array:
    return row_losses(mlp(params, batch["x"]), batch["y"]).mean()


def build_hand_clip(wrap: Wrap) -> Built:
    """Builds gradients clipped by their global norm before `tx.update`."""
    tx, params = wrap(optax.sgd(0.3)), init_mlp(80, (FEATURES, 16, CLASSES))

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        value, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))
        scale = jnp.minimum(1.0, 0.8 / (norm + 1e-6))
        clipped = jax.tree.map(lambda leaf: scale * leaf, grads)
        return updated(tx, state, clipped), {"loss": value, "norm": norm, "clipped": scale < 1}

    return Built({"params": params, "opt_state": tx.init(params)}, train_step, labelled)


def build_ema(wrap: Wrap) -> Built:
    """Builds an exponential moving average of the parameters, and the loss under it."""
    tx, params = wrap(optax.adam(1e-2)), init_mlp(81, (FEATURES, 16, CLASSES))

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        value, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
        state = updated(tx, state, grads)
        ema: Any = optax.incremental_update(state["params"], state["ema"], step_size=0.1)
        return {**state, "ema": ema}, {"loss": value, "ema_loss": mean_loss(ema, batch)}

    state = {"params": params, "opt_state": tx.init(params), "ema": params}
    return Built(state, train_step, labelled)


def build_loss_scaling(wrap: Wrap) -> Built:
    """Builds float16 with a dynamic loss scale: an overflowing step leaves the state unchanged.

    The scale itself overflows, in float16, so this is independent of the division of the batch.
    """
    tx, params = wrap(optax.sgd(0.1)), init_mlp(82, (FEATURES, 16, CLASSES))

    def scaled_loss(params: Net, batch: Any, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
        losses = row_losses(mlp(half, batch["x"].astype(jnp.float16)), batch["y"])
        scaled = (scale.astype(jnp.float16) * losses).astype(jnp.float32).mean()
        return scaled, losses.astype(jnp.float32).mean()

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        scale = state["scale"]
        value_and_grad = jax.value_and_grad(scaled_loss, has_aux=True)
        (_, value), grads = value_and_grad(state["params"], batch, scale)
        grads = jax.tree.map(lambda leaf: leaf / scale, grads)
        finite = jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)]))
        safe = jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0.0), grads)
        changed = updated(tx, {**state, "scale": scale * 2.0}, safe)
        kept = {**state, "scale": scale * 0.5}
        state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), changed, kept)
        return state, {"loss": value, "finite": finite}

    state = {"params": params, "opt_state": tx.init(params), "scale": jnp.float32(2.0**14)}
    return Built(state, train_step, labelled)


def build_row_gradients(wrap: Wrap) -> Built:
    """Builds a gradient for each row by `vmap`, each clipped, then their mean."""
    tx, params = wrap(optax.sgd(0.3)), init_mlp(83, (FEATURES, 8, CLASSES))

    def row_loss(params: Net, x: jax.Array, y: jax.Array) -> jax.Array:
        return row_losses(mlp(params, x), y)

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        each = jax.vmap(jax.value_and_grad(row_loss), in_axes=(None, 0, 0))
        losses, grads = each(state["params"], batch["x"], batch["y"])
        norms = jax.vmap(optax.tree.norm)(grads)
        scales = jnp.minimum(1.0, 1.0 / norms)
        mean = jax.tree.map(lambda leaf: jnp.einsum("b,b...->...", scales, leaf), grads)
        mean = jax.tree.map(lambda leaf: leaf / losses.shape[0], mean)
        return updated(tx, state, mean), {"loss": losses.mean(), "norms": norms}

    return Built({"params": params, "opt_state": tx.init(params)}, train_step, labelled)


def build_gan(wrap: Wrap) -> Built:
    """Builds a generator and a critic, each with its own optimizer and update."""
    makers = {"make": wrap(optax.adam(3e-3, b1=0.5)), "judge": wrap(optax.rmsprop(1e-3))}
    params = {"make": init_mlp(84, (4, 16, FEATURES)), "judge": init_mlp(85, (FEATURES, 16, 1))}

    def scores(judge: Net, x: jax.Array) -> jax.Array:
        return mlp(judge, x)[:, 0]

    def judge_loss(judge: Net, make: Net, batch: Any) -> jax.Array:
        real, fake = scores(judge, batch["x"]), scores(judge, mlp(make, batch["x"][:, :4]))
        return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(fake))

    def make_loss(make: Net, judge: Net, batch: Any) -> jax.Array:
        return jnp.mean(jax.nn.softplus(-scores(judge, mlp(make, batch["x"][:, :4]))))

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        make, judge = state["make"], state["judge"]
        judged, grads = jax.value_and_grad(judge_loss)(judge["params"], make["params"], batch)
        judge = updated(makers["judge"], judge, grads)
        made, grads = jax.value_and_grad(make_loss)(make["params"], judge["params"], batch)
        make = updated(makers["make"], make, grads)
        return {"make": make, "judge": judge}, {"judge": judged, "make": made}

    state = {
        name: {"params": params[name], "opt_state": makers[name].init(params[name])}
        for name in params
    }
    return Built(state, train_step, labelled)


@jax.custom_vjp
def reversed_gradient(x: jax.Array) -> jax.Array:
    """Returns its argument; reverses the sign of the gradient."""
    return x


def _forward(x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (-0.1 * gradient,)


reversed_gradient.defvjp(_forward, _backward)


def build_adversarial(wrap: Wrap) -> Built:
    """Builds two heads, one of them behind a reversed gradient (`custom_vjp`)."""
    tx = wrap(optax.adam(3e-3))
    params = {
        "body": init_mlp(86, (FEATURES, 16)),
        "label": init_mlp(87, (16, CLASSES)),
        "domain": init_mlp(88, (16, 2)),
    }

    def loss(params: dict[str, Net], batch: Any) -> jax.Array:
        features = jnp.tanh(mlp(params["body"], batch["x"]))
        domain = (batch["x"][:, 0] > 0).astype(jnp.int32)
        labels = row_losses(mlp(params["label"], features), batch["y"])
        domains = row_losses(mlp(params["domain"], reversed_gradient(features)), domain)
        return jnp.mean(labels + domains)

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        state = updated(tx, state, grads)
        return state, {"loss": value, "after": loss(state["params"], batch)}

    return Built({"params": params, "opt_state": tx.init(params)}, train_step, labelled)


CASES = (
    case("hand_clip", build_hand_clip, "int_metrics"),
    case("ema", build_ema),
    case("loss_scaling", build_loss_scaling, "low_precision", "int_metrics"),
    case("row_gradients", build_row_gradients, "row_outputs"),
    case("gan", build_gan, "two_optimizers"),
    case("adversarial", build_adversarial),
)

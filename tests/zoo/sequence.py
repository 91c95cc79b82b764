"""Programs over sequences: attention, recurrence, embedding lookups."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from tests.zoo.base import Built, Wrap, case, plain_program
from tests.zoo.data import LENGTH, VOCABULARY, generator, sentences, signals
from tests.zoo.layers import dense, init_dense, init_flax, init_matrix, row_losses


class Transformer(nn.Module):
    """One pre-norm decoder block between an embedding and its logits.

    Attention has no biases: the gradient of a key's bias is zero up to rounding.
    """

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, 16)(tokens)
        x = x + self.param("position", nn.initializers.normal(0.1), (LENGTH, 16))
        heads = nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False)
        x = x + heads(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
        y = nn.Dense(32)(nn.LayerNorm()(x))
        x = x + nn.Dense(16)(nn.gelu(y))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def build_transformer(wrap: Wrap) -> Built:
    """Builds next-token prediction; the loss is the mean over the tokens that are not padding."""
    model = Transformer()
    params = init_flax(model, sentences(0, 2)["tokens"])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=wrap(optax.adamw(3e-3)))

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        weights = batch["mask"][:, 1:].astype(jnp.float32)

        def loss(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["tokens"])[:, :-1]
            losses = row_losses(logits, batch["tokens"][:, 1:])
            return jnp.sum(losses * weights) / jnp.sum(weights)

        value, grads = jax.value_and_grad(loss)(state.params)
        metrics = {"loss": value, "perplexity": jnp.exp(value), "tokens": weights.sum()}
        return state.apply_gradients(grads=grads), metrics

    return Built(state, train_step, sentences)


class Recurrent(nn.Module):
    """An LSTM over time and a dense layer on its last output."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        outputs: jax.Array = nn.RNN(nn.LSTMCell(8))(x)
        return nn.Dense(2)(outputs[:, -1])


def build_lstm(wrap: Wrap) -> Built:
    model = Recurrent()
    params = init_flax(model, signals(0, 2)["x"])

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        logits = jnp.asarray(model.apply(params, batch["x"]))
        return row_losses(logits, batch["y"]).mean(), {}

    return plain_program(wrap(optax.adam(1e-2)), params, loss, signals)


def build_scan_over_time(wrap: Wrap) -> Built:
    """Builds a hand-written recurrence: the batch is carried through a scan over the time axis."""
    params = {
        "in": init_dense(11, 3, 8),
        "again": init_matrix(12, 8, 8),
        "out": init_dense(13, 8, 2),
    }

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        x = batch["x"]

        def tick(hidden: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
            hidden = jnp.tanh(dense(params["in"], now) + hidden @ params["again"])
            return hidden, jnp.mean(jnp.square(hidden))

        start = jnp.zeros((x.shape[0], 8))
        hidden, energy = jax.lax.scan(tick, start, jnp.swapaxes(x, 0, 1))
        value = row_losses(dense(params["out"], hidden), batch["y"]).mean()
        return value + 1e-3 * energy.sum(), {"energy": energy}

    return plain_program(wrap(optax.sgd(0.1)), params, loss, signals)


def build_embedding(wrap: Wrap) -> Built:
    """Builds a bag of words: `jnp.take` of rows, whose gradient is a scatter."""
    table = 0.1 * generator(8).standard_normal((VOCABULARY, 6))
    params = {"table": jnp.asarray(table, dtype=jnp.float32), "out": init_dense(14, 6, 2)}

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        rows = jnp.take(params["table"], batch["tokens"], axis=0)
        weights = batch["mask"][..., None]
        bags = (rows * weights).sum(axis=1) / weights.sum(axis=1)
        parity = batch["tokens"][:, 0] % 2
        return row_losses(dense(params["out"], bags), parity).mean(), {}

    return plain_program(wrap(optax.adagrad(0.1)), params, loss, sentences)


CASES = (
    case("transformer", build_transformer, "core"),
    case("lstm", build_lstm),
    case("scan_over_time", build_scan_over_time),
    case("embedding", build_embedding),
)

"""Train a small causal transformer, character by character, on Python's own help texts.

    python examples/transformer.py

It takes well under a minute on four devices emulated on the CPU. The text, some 470,000
characters, is `pydoc_data.topics` of the standard library; its last tenth is held out.
The last line is `held-out bits per character: 2.2x`, or a little beside it; never above 2.50.
"""

import argparse
import math
from pydoc_data.topics import topics
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jaxfleet as jf

WIDTH, LAYERS, HEADS = 64, 2, 4
LENGTH, BATCH_ROWS = 48, 64


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(jnp.ones(LENGTH))
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(hidden)


class Transformer(nn.Module):
    vocabulary: int

    @nn.compact
    def __call__(self, characters: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, WIDTH)(characters)
        x = x + self.param("position", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        for _ in range(LAYERS):
            x = Block()(x)
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


def bits(state: TrainState, params: Any, rows: Any) -> jax.Array:
    logits = state.apply_fn({"params": params}, rows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
    return losses.mean() / math.log(2)


def train_step(state: TrainState, rows: Any) -> tuple[TrainState, dict[str, jax.Array]]:
    loss, grads = jax.value_and_grad(lambda params: bits(state, params, rows))(state.params)
    return state.apply_gradients(grads=grads), {"bits": loss}


def load() -> tuple[np.ndarray, int]:
    text = "\n".join(topics[name] for name in sorted(topics))
    data = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
    alphabet, characters = np.unique(data, return_inverse=True)
    return characters.astype(np.int32), len(alphabet)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on text with several devices.")
    parser.add_argument("--mode", default="collective", help="the strategy's name")
    parser.add_argument("--devices", type=int, default=4, help="how many to emulate on the CPU")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    jf.emulate_devices(args.devices)

    characters, vocabulary = load()
    windows = np.lib.stride_tricks.sliding_window_view(characters, LENGTH + 1)
    train, held_out = np.split(windows, [len(windows) * 9 // 10])
    starts = np.random.default_rng(0).integers(len(train), size=(args.steps, BATCH_ROWS))
    example = train[starts[0]]

    model = Transformer(vocabulary)
    variables = model.init(jax.random.key(0), example[:, :-1])
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, args.steps // 10, args.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
    tx = jf.distributed_optimizer(tx)  # (1)
    state = TrainState.create(apply_fn=model.apply, tx=tx, **variables)
    step = jf.distribute(train_step, example=(state, example), strategy=args.mode)  # (2)

    for number in range(args.steps):
        state, metrics = step(state, train[starts[number]])  # (3)
        if number % 50 == 0 or number == args.steps - 1:
            print(f"step {number:3d}: {metrics['bits']:.3f} bits per character", flush=True)

    result = jax.jit(bits)(state, state.params, held_out[LENGTH :: len(held_out) // 500])
    print(f"held-out bits per character: {result:.2f}")


if __name__ == "__main__":
    main()

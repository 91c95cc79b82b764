"""Models that the benchmarks train, each with a matching batch."""

# Flax is Any to mypy here, see pyproject.toml.
# mypy: disallow-subclassing-any=False, disallow-untyped-decorators=False, warn-return-any=False

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

Batch = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A Flax module with one batch: `x`, and integer labels `y`."""

    name: str
    module: nn.Module
    batch: Batch

    def init(self) -> Any:
        return self.module.init(jax.random.key(0), self.batch["x"])["params"]

    def loss(self, params: Any, batch: Batch) -> jax.Array:
        logits = self.module.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def models() -> list[Model]:
    """Returns the MLP of 784-512-512-10 with 256 rows, a small CNN and a small transformer."""
    rng = np.random.default_rng(0)
    pixels = {"x": rng.normal(size=(256, 784)).astype(np.float32), "y": _integers(rng, 10, 256)}
    images = {
        "x": rng.normal(size=(64, 16, 16, 3)).astype(np.float32),
        "y": _integers(rng, 10, 64),
    }
    tokens = {"x": _integers(rng, 96, 64, 32), "y": _integers(rng, 96, 64, 32)}
    return [
        Model("mlp", MLP(), pixels),
        Model("cnn", CNN(), images),
        Model("transformer", Transformer(), tokens),
    ]


def _integers(rng: np.random.Generator, high: int, *shape: int) -> Any:
    return rng.integers(high, size=shape).astype(np.int32)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (512, 512):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (32, 64):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(96, 64)(tokens)
        x = x + self.param("position", nn.initializers.normal(0.02), x.shape[1:])
        mask = nn.make_causal_mask(np.ones(tokens.shape[1]))
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
        return nn.Dense(96)(nn.LayerNorm()(x))

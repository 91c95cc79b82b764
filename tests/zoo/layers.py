"""Hand-written layers for zoo entries without Flax."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from tests.zoo.data import generator

Dense = dict[str, jax.Array]


def init_matrix(seed: int, rows: int, columns: int) -> jax.Array:
    """Makes a matrix whose product with a unit vector has about unit length."""
    values = generator(7, seed).standard_normal((rows, columns)) / np.sqrt(rows)
    return jnp.asarray(values, dtype=jnp.float32)


def init_dense(seed: int, fan_in: int, fan_out: int) -> Dense:
    """Makes the weights of one affine layer."""
    return {"w": init_matrix(seed, fan_in, fan_out), "b": jnp.zeros(fan_out)}


def init_mlp(seed: int, sizes: Sequence[int]) -> dict[str, Dense]:
    """Makes the weights of affine layers `fc0`, `fc1`, ... through the given widths."""
    return {f"fc{i}": init_dense(31 * seed + i, *pair) for i, pair in enumerate(pairwise(sizes))}


def init_flax(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Makes the variables of a linen module without compiling its own initializers.

    Those take longer to compile than the entry's step.
    """
    init = partial(model.init, **options)
    shapes = jax.eval_shape(
        init, {"params": jax.random.key(0), "dropout": jax.random.key(1)}, *inputs
    )
    paths, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    leaves = [_init_leaf(seed, path[-1].key, leaf.shape) for seed, (path, leaf) in enumerate(paths)]
    return jax.tree.unflatten(treedef, leaves)


def _init_leaf(seed: int, name: str, shape: tuple[int, ...]) -> jax.Array:
    if name in {"bias", "mean"}:
        return jnp.zeros(shape)
    if name in {"scale", "var"}:
        return jnp.ones(shape)
    *fan_in, fan_out = shape
    return init_matrix(seed, math.prod(fan_in), fan_out).reshape(shape)


def dense(layer: Dense, x: jax.Array) -> jax.Array:
    return x @ layer["w"] + layer["b"]


def mlp(params: dict[str, Dense], x: jax.Array) -> jax.Array:
    """Applies the layers in order, with tanh between them."""
    for i in range(len(params)):
        x = dense(params[f"fc{i}"], jnp.tanh(x) if i else x)
    return x


def row_losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the cross entropy of each row."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.asarray(losses)


def layer_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Normalises the last axis to mean 0 and variance 1, then scales it."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return scale * centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + 1e-5)

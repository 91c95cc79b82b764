"""Compares a distributed step with the plain function on one device, step by step."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import jaxfleet as jf
from tests.zoo import ZOO, Case, identity

Array = NDArray[Any]

# In float32 a sum over the batch is added up in another order on several devices: some units in the
# last place (6e-8) a step, of values near 1. XLA's own partitioner differs from one device by as
# much: up to 1.2e-6 after 20 steps, where a perplexity of 27 magnifies it.
FLOAT32 = 3e-6
# Below float32 a unit in the last place is 4e-3 (bfloat16) or 5e-4 (float16).
LOW_PRECISION = 1e-2


def tolerance(entry: Case) -> float:
    """Returns how far an entry may be from one device, of `1 + |value|`."""
    return LOW_PRECISION if "low_precision" in entry.traits else FLOAT32


def arrays(tree: Any) -> list[Array]:
    """Returns the leaves as numpy arrays, random keys as their data."""
    return [np.asarray(_readable(leaf)) for leaf in jax.tree.leaves(tree)]


@cache
def on_one_device(name: str, steps: int) -> list[list[Array]]:
    """Returns state and metrics of an entry's plain function after each step."""
    entry = ZOO[name]
    built = entry.build(identity)
    train_step, state = jax.jit(built.train_step), built.state
    results = []
    for number in range(steps):
        state, metrics = train_step(state, built.batch(number, entry.rows))
        results.append(arrays((state, metrics)))
    return results


def distributed(name: str, steps: int, strategy: jf.DistributedStrategy) -> Iterator[Any]:
    """Yields state and metrics of the same on devices, after each step."""
    entry = ZOO[name]
    built = entry.build(jf.distributed_optimizer)
    example = (built.state, built.batch(0, entry.rows))
    step, state = jf.distribute(built.train_step, example, strategy), built.state
    for number in range(steps):
        state, metrics = step(state, built.batch(number, entry.rows))
        yield state, metrics


def assert_close(found: Any, wanted: list[Array], allowed: float, where: str) -> None:
    """Fails unless all leaves are equal, floats to within what is allowed."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(found)]
    for path, x, y in zip(paths, arrays(found), wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), f"{path} {where}"
        if np.issubdtype(x.dtype, np.floating):
            np.testing.assert_allclose(x, y, rtol=allowed, atol=allowed, err_msg=f"{path} {where}")
        else:
            np.testing.assert_array_equal(x, y, err_msg=f"{path} {where}")


def assert_equal(found: Any, wanted: list[Array], where: str) -> None:
    """Fails unless all leaves are equal bit by bit."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(found)]
    for path, x, y in zip(paths, arrays(found), wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), f"{path} {where}"
        assert x.tobytes() == y.tobytes(), f"{path} {where} differs"


def _readable(leaf: Any) -> Any:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf

"""Compares a distributed step with the plain function on one device, step by step."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import jaxfleet as jf
from jaxfleet.runtime.devices import choose_devices
from jaxfleet.runtime.step import Step
from tests.shared_zoo import Array, arrays, built_zoo, captured_zoo, one_device
from tests.zoo import ZOO, Case

# In float32 a sum over the batch has another order on several devices: some ULPs (6e-8) per step
# for values near 1. XLA's own partitioner differs from one device by as much: up to 1.2e-6 after
# 20 steps, where a perplexity of 27 magnifies it.
FLOAT32 = 3e-6
# Below float32 the ULP is 4e-3 (bfloat16) or 5e-4 (float16).
LOW_PRECISION = 1e-2
ELSEWHERE = {  # reason for no comparison here
    "rbg": "draws other numbers on each device: test_randomness.py",
}


def tolerance(entry: Case) -> float:
    """Returns an entry's allowed difference from one device, relative to `1 + |value|`."""
    return LOW_PRECISION if "low_precision" in entry.traits else FLOAT32


def on_one_device(name: str, steps: int) -> list[list[Array]]:
    """Returns state and metrics of an entry's plain function after each step."""
    return one_device(name).results(steps)


def distributed(name: str, steps: int, strategy: jf.DistributedStrategy) -> Iterator[Any]:
    """Yields state and metrics of the same on devices, after each step."""
    entry, built = ZOO[name], built_zoo(name)
    devices = choose_devices(1 if strategy.mode == "single" else strategy.devices)
    step, state = Step(captured_zoo(name), strategy, devices), own(built.state)
    for number in range(steps):
        state, metrics = step(state, built.batch(number, entry.rows))
        yield state, metrics


def own(state: Any) -> Any:
    """Returns a copy of a state, since a step may donate its arguments."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, state)


def assert_close(found: Any, wanted: list[Array], allowed: float, where: str) -> None:
    """Fails unless all leaves are equal, floats within `allowed`."""
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


def compare(name: str, devices: int, steps: int) -> None:
    """Fails unless devices match the plain function: a single device bit by bit."""
    wanted = on_one_device(name, steps)
    found = distributed(name, steps, jf.DistributedStrategy(devices=devices))
    for number, result in enumerate(found):
        if devices == 1:
            assert_equal(result, wanted[number], f"after step {number}")
        else:
            allowed = tolerance(ZOO[name])
            assert_close(result, wanted[number], allowed, f"after step {number}")

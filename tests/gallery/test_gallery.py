"""The gallery on devices and over servers, against one device and the noise of a 1e-6 change."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfleet as jf
from tests.gallery import GALLERY
from tests.runtime.comparing import own
from tests.zoo import Built
from tests.zoo.base import identity

STEPS, ROWS = 3, 16
CHANGE = 1e-6  # of every float of the first state
ROOM = 10.0  # times what such a change makes, or of float32's own rounding
STRATEGY = jf.DistributedStrategy(min_block_size=8, max_imbalance=0)


def wrapped(name: str) -> Built:
    return GALLERY[name](jf.distributed_optimizer)


def batches(built: Built) -> list[Any]:
    return [built.batch(number, ROWS) for number in range(STEPS)]


@cache
def on_one_device(name: str) -> tuple[Any, float]:
    """Returns the last state, and how far a small change of the first one moves it."""
    built = GALLERY[name](identity)
    step, ends = jax.jit(built.train_step), []
    for change in (0.0, CHANGE):
        state = jax.tree.map(lambda leaf, by=change: changed(leaf, by), built.state)
        for batch in batches(built):
            state, _ = step(state, batch)
        ends.append(state)
    return ends[0], difference(ends[1], ends[0])


def changed(leaf: Any, by: float) -> Any:
    leaf = jnp.asarray(leaf)
    return leaf * (1 + by) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def difference(found: Any, expected: Any) -> float:
    """Returns the largest difference of a leaf, of the largest value in it."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(_apart(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs)


def _apart(found: np.ndarray, expected: np.ndarray) -> float:
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    largest = np.abs(expected).max(initial=1e-30)
    return float(np.abs(found - expected).max(initial=0.0) / largest)


def on_devices(name: str) -> Any:
    built = wrapped(name)
    state, strategy = own(built.state), jf.DistributedStrategy(devices=4)
    step: Any = jf.distribute(built.train_step, (state, built.batch(0, ROWS)), strategy)
    for batch in batches(built):
        state, _ = step(state, batch)
    return state


def over_servers(name: str) -> jf.Twin:
    built = wrapped(name)
    return jf.Twin(
        built.train_step, (built.state, built.batch(0, ROWS)), STRATEGY, servers=2, trainers=2
    )


@pytest.mark.grid
@pytest.mark.parametrize("name", GALLERY)
def test_four_devices_are_within_the_noise_of_one(name: str) -> None:
    expected, noise = on_one_device(name)
    assert difference(on_devices(name), expected) <= ROOM * max(noise, CHANGE)


@pytest.mark.grid
@pytest.mark.parametrize("name", GALLERY)
def test_two_servers_and_two_trainers_are_within_the_noise_of_one_device(name: str) -> None:
    expected, noise = on_one_device(name)
    built = wrapped(name)
    result = over_servers(name).run(built.state, batches(built))
    for state in result.states:
        assert difference(state, expected) <= ROOM * max(noise, CHANGE)


ON_TRAINERS = {
    *("clipped_examples", "sam", "line_search", "learned_rate", "ppo"),
    *("dynamic_scale", "all_finite", "prodigy", "dadapt", "mechanize"),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", GALLERY)
def test_servers_update_wherever_they_can(name: str) -> None:
    stage = over_servers(name).programs().dumps["update_on_trainers"]
    assert (stage.after is not stage.before) == (name in ON_TRAINERS)


@pytest.mark.parametrize("name", ["dqn", "all_finite"])
def test_a_program_of_each_kind_is_within_the_noise_of_one_device(name: str) -> None:
    expected, noise = on_one_device(name)
    built = wrapped(name)
    (state, _) = over_servers(name).run(built.state, batches(built)).states
    assert difference(state, expected) <= ROOM * max(noise, CHANGE)
    assert difference(on_devices(name), expected) <= ROOM * max(noise, CHANGE)

"""The gallery on devices and over servers, against one device and the noise of a 1e-6 change."""

from contextlib import nullcontext
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.errors import CaptureError
from tests.gallery import GALLERY
from tests.gallery.parts import arguments, state_of
from tests.runtime.comparing import own
from tests.zoo import Built
from tests.zoo.base import identity

STEPS, ROWS = 3, 16
CHANGE = 1e-6  # of every float of the initial state
ROOM = 10.0  # times the effect of such a change, or of float32's own rounding
LARGEST_NOISE = 2e-3
STRATEGY = jf.DistributedStrategy(min_block_size=8, max_imbalance=0)


def wrapped(name: str) -> Built:
    return GALLERY[name](jf.distributed_optimizer)


def batches(built: Built) -> list[Any]:
    return [built.batch(number, ROWS) for number in range(STEPS)]


@cache
def on_one_device(name: str) -> tuple[Any, float]:
    """Returns the final state, and its sensitivity to a small change of the initial one."""
    built = GALLERY[name](identity)
    step, ends = jax.jit(built.train_step), []
    for change in (0.0, CHANGE):
        state = jax.tree.map(lambda leaf, by=change: changed(leaf, by), built.state)
        for batch in batches(built):
            state = state_of(built, step(*arguments(built, state, batch)))
        ends.append(state)
    return ends[0], difference(ends[1], ends[0])


def changed(leaf: Any, by: float) -> Any:
    leaf = jnp.asarray(leaf)
    return leaf * (1 + by) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def difference(found: Any, expected: Any) -> float:
    """Returns the largest difference of a leaf, relative to its largest value."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(_apart(_numbers(x), _numbers(y)) for x, y in pairs)


def _numbers(leaf: Any) -> np.ndarray:
    is_key = jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf, np.float64)


def _apart(found: np.ndarray, expected: np.ndarray) -> float:
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    largest = np.abs(expected).max(initial=1e-30)
    return float(np.abs(found - expected).max(initial=0.0) / largest)


def on_devices(name: str) -> Any:
    built = wrapped(name)
    state, strategy = own(built.state), jf.DistributedStrategy(devices=4)
    example = arguments(built, state, built.batch(0, ROWS))
    step: Any = jf.distribute(built.train_step, example, strategy)
    for batch in batches(built):
        state = state_of(built, step(*arguments(built, state, batch)))
    return state


class Job:
    """A program on servers and trainers, called with its own arguments."""

    def __init__(self, name: str) -> None:
        self.built = wrapped(name)
        example = arguments(self.built, self.built.state, self.built.batch(0, ROWS))
        self.captured = jf.capture(self.built.train_step, example=example)
        self.twin = jf.Twin(self.captured, strategy=STRATEGY, servers=2, trainers=2)

    def states(self) -> list[Any]:
        built, of = self.built, self.captured.arguments
        given = [arguments(built, built.state, batch) for batch in batches(built)]
        pairs = given if of is None else [of.split(each) for each in given]
        result = self.twin.run(pairs[0][0], [batch for _, batch in pairs])
        if of is None:
            return list(result.states)
        return [self._in_order(of.unpacked(state)) for state in result.states]

    def _in_order(self, named: dict[str, Any]) -> tuple[Any, ...]:
        assert self.captured.arguments is not None
        return tuple(named[name] for name in self.captured.arguments.state)


REFUSED = {
    "joined_graphs": (
        "the batch's leaves differ in their leading axis: 'batch/wanted' has 2, 'batch/nodes' has",
        "test_gallery.py",
        "pad what belongs to one example to one size, and stack the examples",
    ),
    "rule_unmarked": (
        "the gradient of 'inner/fc0/b' does not pass through distributed_optimizer",
        "science.py",
        "jf.distributed_optimizer(optax.identity()).update(grads, opt, params)",
    ),
}
"""Those that are refused: what is said, the file of the line that is named, and the way out."""

RUN = [name for name in GALLERY if name not in REFUSED]
UNDIVIDED = {"evolution"}  # ranks its population's losses, without a gradient by the batch


@pytest.mark.grid
@pytest.mark.parametrize("name", RUN)
def test_four_devices_are_within_the_noise_of_one(name: str) -> None:
    expected, noise = on_one_device(name)
    is_said = pytest.warns(UserWarning, match="is not divided: each of 4 devices does all")
    with is_said if name in UNDIVIDED else nullcontext():
        state = on_devices(name)
    assert difference(state, expected) <= ROOM * max(noise, CHANGE)


@pytest.mark.grid
@pytest.mark.parametrize("name", RUN)
def test_two_servers_and_two_trainers_are_within_the_noise_of_one_device(name: str) -> None:
    expected, noise = on_one_device(name)
    for state in Job(name).states():
        assert difference(state, expected) <= ROOM * max(noise, CHANGE)


@pytest.mark.grid
@pytest.mark.parametrize("name", RUN)
def test_a_small_change_is_small_in_the_end_so_that_its_noise_hides_no_mistake(name: str) -> None:
    _, noise = on_one_device(name)
    assert noise < LARGEST_NOISE


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_the_line_and_the_way_out(name: str) -> None:
    cause, file, hint = REFUSED[name]
    with pytest.raises(CaptureError) as caught:
        on_devices(name)
    notes = "\n".join(caught.value.__notes__)
    assert cause in str(caught.value)
    assert file in notes
    assert hint in notes


ON_TRAINERS = {
    *("clipped_examples", "sam", "line_search", "learned_rate", "ppo", "rule"),
    *("dynamic_scale", "all_finite", "prodigy", "dadapt", "mechanize"),
    *("clipped_actor_critic", "gradient_penalty"),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", RUN)
def test_servers_update_wherever_they_can(name: str) -> None:
    stage = Job(name).twin.programs().dumps["update_on_trainers"]
    assert (stage.after is not stage.before) == (name in ON_TRAINERS)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["dqn", "all_finite"])
def test_a_program_of_each_kind_is_within_the_noise_of_one_device(name: str) -> None:
    expected, noise = on_one_device(name)
    (state, _) = Job(name).states()
    assert difference(state, expected) <= ROOM * max(noise, CHANGE)
    assert difference(on_devices(name), expected) <= ROOM * max(noise, CHANGE)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["moco", "mixup", "codebook", "graphs", "shampoo", "dataclasses"])
def test_a_program_of_every_other_kind_runs_on_devices_within_the_noise(name: str) -> None:
    expected, noise = on_one_device(name)
    assert difference(on_devices(name), expected) <= ROOM * max(noise, CHANGE)

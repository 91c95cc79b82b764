"""Checkpoints and invalid steps, in asynchronous modes."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import PassError, StrategyError
from jaxfleet.runtime.simulated_job import Twin
from tests.modes.linear import batch, start, train_step, twin
from tests.runtime import toys

MODES = ["async", "half_async", "geo", "dc_asgd", "fl"]


@pytest.mark.few(2)
@pytest.mark.parametrize("how", MODES)
def test_what_is_saved_is_what_servers_have_of_all_trainers(how: str, tmp_path: Path) -> None:
    def script(step: Any) -> Any:
        state = start()
        for number in range(5):  # not a multiple of exchanges
            state, _ = step(state, batch(number))
        step.save(tmp_path / "saved", state)
        saved = np.asarray(step.pull(state)["w"])
        for number in range(5, 8):
            state, _ = step(state, batch(number))
        restored = step.restore(tmp_path / "saved")
        found = np.asarray(restored["w"])
        again, _ = step(restored, batch(5))
        return (saved, found, np.asarray(again["w"])), ()

    options: Any = {"trainers": 2, "k_steps": 2}
    ends = twin(how, **options).play(script).states
    for saved, found, again in ends:
        np.testing.assert_array_equal(saved, found)
        assert np.isfinite(again).all()
    np.testing.assert_array_equal(ends[0][1], ends[1][1])


@pytest.mark.few(2)
@pytest.mark.parametrize("how", MODES)
def test_a_state_in_the_middle_replaces_what_servers_have(how: str, tmp_path: Path) -> None:
    fresh = jnp.full((6,), 0.25)

    def script(step: Any) -> Any:
        state = start()
        for number in range(3):
            state, _ = step(state, batch(number))
        state = {**state, "w": fresh}
        step.save(tmp_path / "middle", state)
        return np.asarray(step.restore(tmp_path / "middle")["w"]), ()

    for found in twin(how, trainers=2, k_steps=2).play(script).states:
        np.testing.assert_array_equal(found, np.asarray(fresh))


def clipped(how: Any) -> Twin:
    tx = jf.distributed_optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)))
    strategy = jf.DistributedStrategy(mode="pserver", communication=how, k_steps=2)
    return Twin(toys.training(tx), (toys.start(tx), toys.rows(8)), strategy, servers=2, trainers=2)


@pytest.mark.parametrize("how", ["async", "half_async", "dc_asgd"])
def test_an_optimizer_that_crosses_parameters_is_refused_with_a_way_out(how: str) -> None:
    with pytest.raises(PassError, match="brings parameters together") as caught:
        clipped(how).programs()
    assert "'geo' and 'fl'" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("how", ["geo", "fl"])
def test_trainers_that_update_take_any_optimizer(how: str) -> None:
    job = clipped(how)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    ends = job.run(toys.start(tx), [toys.rows(8, n) for n in range(4)]).states
    assert all(np.isfinite(np.asarray(end["params"]["w"])).all() for end in ends)


def test_a_mesh_goes_together() -> None:
    strategy = jf.DistributedStrategy(mode="collective", communication="async")
    with pytest.raises(StrategyError, match="between trainers and servers"):
        jf.distribute(train_step, (start(), batch(0)), strategy)


def test_statistics_of_each_trainer_are_not_asked_for_twice() -> None:
    with pytest.raises(StrategyError, match="local_statistics"):
        jf.DistributedStrategy(mode="pserver", communication="async", local_statistics=True)

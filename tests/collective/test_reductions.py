"""All-reduces of two levels, and in several streams, give the same sums."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.errors import StrategyError
from tests.collective.models import (
    OPTIMIZERS,
    STEPS,
    assert_close,
    batch,
    distributed,
    start,
    training,
)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [
        ("clipped", 4, {"hierarchical": 2}),
        ("momentum", 8, {"hierarchical": 4, "fuse_allreduce_bytes": 1 << 20}),
        ("adam", 4, {"hierarchical": 2, "merge": 1, "lowering": "pmap"}),
    ],
    ids=str,
)
def test_two_levels_compute_what_one_device_does(name: str, devices: int, options: Any) -> None:
    tx = OPTIMIZERS[name]()
    step, state = distributed(name, jf.DistributedStrategy(devices=devices, **options))
    one, wanted = jax.jit(training(tx)), start(tx)
    for number in range(STEPS):
        state, metrics = step(state, batch(number))
        wanted, expected = one(wanted, batch(number))
        assert_close((state, metrics), (wanted, expected), f"after step {number}")
    assert "within groups of" in step.explain()


def test_across_groups_goes_a_part_of_the_bytes() -> None:
    step, _ = distributed("sgd", jf.DistributedStrategy(devices=4, hierarchical=2))
    text = step.lower().as_text()
    assert text.count("dense<[[0, 1], [2, 3]]>") == 6  # three gradients: scattered, and gathered
    assert text.count("dense<[[0, 2], [1, 3]]>") == 3


@pytest.mark.grid
def test_a_mean_of_two_levels_is_the_same() -> None:
    apart = {"devices": 4, "communication": "local_sgd", "k_steps": 2}
    step, state = distributed("adam", jf.DistributedStrategy(**apart))  # type: ignore[arg-type]
    both, other = distributed("adam", jf.DistributedStrategy(**apart, hierarchical=2))  # type: ignore[arg-type]
    for number in range(4):
        state, _ = step(state, batch(number))
        other, _ = both(other, batch(number))
    assert_close(other.params, state.params)


def test_rings_are_bitwise_the_same_and_are_joined_each_for_itself() -> None:
    def reductions(step: jf.Step) -> list[int]:
        ops = step.program.root.ops
        return [x.attrs["ring_id"] for x in ops if x.type == "c_allreduce_sum" and x.role_var]  # type: ignore[misc]

    plain, state = distributed("adam", jf.DistributedStrategy(devices=4))
    apart, other = distributed("adam", jf.DistributedStrategy(devices=4, rings=2))
    for number in range(3):
        state, _ = plain(state, batch(number))
        other, _ = apart(other, batch(number))
    jax.tree.map(np.testing.assert_array_equal, other, state)
    assert reductions(apart) == [0, 1, 0]
    joined, _ = distributed(
        "adam", jf.DistributedStrategy(devices=4, rings=2, fuse_allreduce_bytes=1 << 20)
    )
    assert sorted(reductions(joined)) == [0, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hierarchical": 1}, "hierarchical is 1"),
        ({"hierarchical": 2, "sharded": True}, "hierarchical with sharded"),
        ({"hierarchical": 2, "mode": "single"}, "hierarchical in mode 'single'"),
        ({"rings": 0}, "rings is 0"),
        ({"rings": 2, "mode": "pserver"}, "rings in mode 'pserver'"),
        ({"rings": 2, "communication": "local_sgd"}, "which reduces no gradients"),
        ({"hierarchical": 2, "devices": 2}, "hierarchical is 2, and there are 2 devices"),
        ({"hierarchical": 3, "devices": 4}, "hierarchical is 3, and there are 4 devices"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options: Any, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        distributed("sgd", jf.DistributedStrategy(**options))

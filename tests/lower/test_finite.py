"""The flag for values that are not finite: found in any value; each device checks a part."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxfleet.lower.finite import Part, all_finite
from jaxfleet.lower.spmd import AXIS, device_mesh

DEVICES = 4
SHAPES = {"large": (3, 1367), "long": (4099,), "small": (5, 3), "number": ()}


def values() -> dict[str, Any]:
    drawn = np.random.default_rng(0)
    return {name: drawn.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def flags() -> Any:
    """Returns a function of arrays that all devices have: `bool[devices]`."""
    devices = jax.devices()[:DEVICES]

    def body(shared: dict[str, Any]) -> Any:
        return all_finite((), list(shared.values()), Part.of(AXIS, devices)).reshape(1)

    whole, each = PartitionSpec(), PartitionSpec(AXIS)
    mesh = device_mesh(devices)
    run = jax.shard_map(body, mesh=mesh, in_specs=whole, out_specs=each, check_vma=False)
    return jax.jit(run).lower(values()).compile()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_some_device_finds_it_wherever_it_is(flags: Any, name: str, bad: float) -> None:
    assert np.asarray(flags(values())).all()
    size = values()[name].size
    for place in {0, size // 4, size // 3, size // 2, size - 2, size - 1} & set(range(size)):
        arrays = values()
        arrays[name].reshape(-1)[place] = bad
        assert not np.asarray(flags(arrays)).all(), place


def test_the_greatest_numbers_are_finite(flags: Any) -> None:
    most = np.finfo(np.float32).max
    for number in (most, -most):
        assert np.asarray(flags({k: np.full(v, number, "f") for k, v in SHAPES.items()})).all()


def test_each_device_looks_at_a_part(flags: Any) -> None:
    size = sum(value.size for value in values().values())
    assert flags.cost_analysis()["flops"] < 2 * size / DEVICES * 1.1
    assert flags.cost_analysis()["bytes accessed"] < 4 * size / DEVICES * 1.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_numbers_of_every_width_are_looked_at(dtype: str) -> None:
    array = jnp.ones((70, 70), dtype)
    assert all_finite([array])
    assert not all_finite([array.at[69, 3].set(jnp.nan)])


@pytest.mark.parametrize(
    ("owners", "count"),
    [([0] * 4, 4), ([0, 0, 1, 1], 2), ([0, 1], None), ([0, 1, 0, 1], None), ([0, 0, 1], None)],
)
def test_the_devices_of_one_process_look_at_all(owners: list[int], count: int | None) -> None:
    part = Part.of(AXIS, [SimpleNamespace(process_index=owner) for owner in owners])
    assert (None if part is None else part.count) == count

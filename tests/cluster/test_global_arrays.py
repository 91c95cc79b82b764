"""Global arrays on the devices of a single process."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfleet.cluster.global_arrays import gathering, of_rank_0, whole_array


def alone() -> Any:
    """Returns the only rank of a group."""

    def run(_: str, compute: Callable[[], Any], *, timeout_s: float) -> Any:
        assert timeout_s
        return compute()

    return SimpleNamespace(rank=0, size=1, run=run)


def test_arrays_that_lie_alike_are_made_whole_by_what_was_compiled_once() -> None:
    sharding = NamedSharding(Mesh(jax.devices(), ("devices",)), PartitionSpec("devices"))
    before = gathering.cache_info().misses
    for number in range(3):
        rows = np.arange(4.0 * len(jax.devices()), dtype=np.float32) + number
        whole = whole_array(alone(), jax.device_put(rows, sharding), timeout_s=9.0)
        assert whole.is_fully_replicated
        np.testing.assert_array_equal(whole, rows)
    assert gathering.cache_info().misses == before + 1


def test_the_state_of_the_first_is_what_it_was() -> None:
    values: list[Any] = [np.arange(5, dtype=np.int8), jax.random.key(3), 2.5, np.zeros((0, 3))]
    found = of_rank_0(alone(), values, timeout_s=9.0)
    np.testing.assert_array_equal(found[0], values[0])
    assert jax.random.key_data(found[1]).tolist() == jax.random.key_data(values[1]).tolist()
    assert found[2] == 2.5
    assert found[3].shape == (0, 3)

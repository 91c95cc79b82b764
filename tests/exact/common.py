"""Runs zoo programs on the in-process twin, and the references for comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import jax
import numpy as np

import jaxfleet as jf
from jaxfleet.lower import ExecutableCache
from jaxfleet.runtime.simulated_job import Twin, TwinResult
from tests.runtime.comparing import on_one_device, tolerance
from tests.shared_zoo import Array, arrays, built_zoo, captured_zoo
from tests.zoo import ZOO, Built

Method = Literal["round_robin", "hash_name", "balanced"]
STEPS = 5  # initial state, update and reuse: errors show by step 3
LONGEST = 20


@dataclass(frozen=True)
class Cut:
    """Slicing and placement of a job.

    Attributes:
        servers: the number of servers.
        min_block_size: the fewest elements of a slice; 0: nothing is sliced.
        dispatch: the placement of slices.
        trainers: the number of trainers.
    """

    servers: int = 1
    min_block_size: int = 0
    dispatch: Method = "round_robin"
    trainers: int = 1

    @property
    def strategy(self) -> jf.DistributedStrategy:
        """The same as a strategy; any imbalance of servers is allowed."""
        return jf.DistributedStrategy(
            mode="pserver",
            slice_var=self.min_block_size > 0,
            min_block_size=max(self.min_block_size, 1),
            dispatch=self.dispatch,
            max_imbalance=0,
        )

    def __str__(self) -> str:
        """Returns the name in a test's id."""
        cut = f"from{self.min_block_size}" if self.min_block_size else "whole"
        return f"{self.servers}s-{cut}-{self.dispatch}-{self.trainers}t"


@dataclass(frozen=True)
class Prepared:
    """A program of the zoo, captured once."""

    built: Built
    captured: jf.Captured
    batches: tuple[Any, ...]


@cache
def prepared(name: str) -> Prepared:
    """Returns a program of the zoo, and the batches of all cases."""
    built = built_zoo(name)
    batches = tuple(built.batch(step, ZOO[name].rows) for step in range(LONGEST))
    return Prepared(built, captured_zoo(name), batches)


def executables() -> ExecutableCache:
    """Returns the executables of the running test's kind of compilation: equal blocks share one."""
    return _executables(jax.config.read("jax_disable_most_optimizations"))


@cache
def _executables(quickly: object) -> ExecutableCache:  # the cache key
    return ExecutableCache()


def run(name: str, cut: Cut, *, steps: int = STEPS) -> TwinResult:
    """Trains a program of the zoo on trainers and servers."""
    ready = prepared(name)
    twin = Twin(
        ready.captured,
        strategy=cut.strategy,
        servers=cut.servers,
        trainers=cut.trainers,
        cache=executables(),
    )
    return twin.run(ready.built.state, ready.batches[:steps])


def on_one_server(name: str, trainers: int, steps: int = STEPS) -> list[Array]:
    """Returns the trainers' final state if one server holds everything whole."""
    quickly = jax.config.read("jax_disable_most_optimizations")
    return _on_one_server(name, trainers, steps, quickly)


@cache
def _on_one_server(name: str, trainers: int, steps: int, quickly: object) -> list[Array]:
    return arrays(run(name, Cut(trainers=trainers), steps=steps).states[0])


def assert_same(found: Any, wanted: Any, where: str) -> None:
    """Fails unless two trees are equal bit by bit, one of them perhaps a list of arrays."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(found)]
    for path, x, y in zip(paths, arrays(found), arrays(wanted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), f"{path} {where}"
        assert x.tobytes() == y.tobytes(), f"{path} {where}: {_apart(x, y)}"


def assert_near_one_device(name: str, state: Any, metrics: Sequence[Any]) -> None:
    """Fails unless the last state, and the metrics of every step, are those of one device.

    Trainers add their sums over rows to each other, one device sums all rows in XLA's order:
    float32 differs by some ULPs per step. Lower precisions have larger ULPs. Programs that draw
    other numbers on several devices are not compared at all.
    """
    if "device_keys" in ZOO[name].traits:
        return
    allowed = tolerance(ZOO[name])
    one_device = on_one_device(name, len(metrics))
    for step, (found, wanted) in enumerate(zip(metrics, one_device, strict=False)):
        count = len(arrays(found))
        _assert_near(found, wanted[len(wanted) - count :], allowed, f"step {step}")
    end = one_device[-1]
    _assert_near(state, end[: len(arrays(state))], allowed, "at the end")


def _assert_near(found: Any, wanted: Sequence[Array], allowed: float, where: str) -> None:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(found)]
    for path, x, y in zip(paths, arrays(found), wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), f"{path} {where}"
        if np.issubdtype(x.dtype, np.integer) or x.dtype == bool:
            np.testing.assert_array_equal(x, y, err_msg=f"{path} {where}")
        else:
            wide = x.astype(np.float64), y.astype(np.float64)
            np.testing.assert_allclose(*wide, rtol=allowed, atol=allowed, err_msg=f"{path} {where}")


def _apart(x: Array, y: Array) -> str:
    return f"{int((x != y).sum())} of {x.size} elements differ"

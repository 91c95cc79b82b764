"""Shows that a step means on trainers and servers what it means on one device."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxfleet.capture import capture
from jaxfleet.errors import FeedError
from jaxfleet.runtime.devices import choose_devices
from jaxfleet.runtime.saving import on_host
from jaxfleet.runtime.step import Step
from jaxfleet.runtime.strategy import DistributedStrategy
from jaxfleet.runtime.twin import Twin

_SHOWN = 5


@dataclass(frozen=True)
class Verification:
    """How far a job in one process ended from one device.

    Attributes:
        steps: how many were run.
        differences: by leaf of the state: the largest difference over the largest value; infinite
            where only one has a value that is not finite.
        same_on_all: whether all trainers ended with the same state, bit by bit.
    """

    steps: int
    differences: dict[str, float]
    same_on_all: bool

    @property
    def largest(self) -> float:
        """The largest of the differences."""
        return max(self.differences.values(), default=0.0)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        same = "the same state on all trainers" if self.same_on_all else "trainers that DIFFER"
        yield f"{self.steps} steps, {same}; off from one device by at most {self.largest:.1e}"
        worst = sorted(self.differences.items(), key=lambda item: -item[1])
        yield from (f"  {name}: {value:.1e}" for name, value in worst[:_SHOWN] if value)


def verify(
    train_step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: Sequence[Any],
    strategy: DistributedStrategy | str | None = None,
    *,
    servers: int = 2,
    trainers: int = 2,
) -> Verification:
    """Trains on trainers and servers in one process, and on one device, and compares the states.

    The processes are threads that take turns on a network in memory; all else is as in a job.

    Args:
        train_step: the step.
        state: where both start; it can be used afterwards.
        batches: global batches, one a step; rows that the trainers can share.
        strategy: how the step is cut and placed.
        servers: how many.
        trainers: how many.

    Raises:
        CaptureError: the step cannot be captured.
        PassError: it cannot be divided between trainers and servers.
        FeedError: a batch cannot be divided among the trainers, or there is none.
        StrategyError: there would be no server, or no trainer.
    """
    if len(batches) == 0:
        raise FeedError("there is no batch to verify on", hint="pass a list of global batches")
    captured = capture(train_step, example=(state, batches[0]))
    result = Twin(captured, None, strategy, servers=servers, trainers=trainers).run(state, batches)
    keeping = DistributedStrategy(mode="single", donate=False)  # the state is the caller's
    alone = Step(captured, keeping, choose_devices(1))
    expected = state
    for batch in batches:
        expected, _ = alone(expected, batch)
    ends = [[on_host(x) for x in jax.tree_util.tree_leaves(end)] for end in result.states]
    wanted = [on_host(x) for x in jax.tree_util.tree_leaves(expected)]
    names = [leaf.name for leaf in captured.signature.state]
    differences = {
        name: _difference(found, one)
        for name, found, one in zip(names, ends[0], wanted, strict=True)
    }
    same = all(_same(x, y) for end in ends for x, y in zip(end, ends[0], strict=True))
    return Verification(len(batches), differences, same)


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    if not expected.size or _same(found, expected):
        return 0.0
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    left, right = found.astype(wide), expected.astype(wide)
    if not np.array_equal(np.isfinite(left), np.isfinite(right)):
        return math.inf
    finite = np.isfinite(right)
    if not np.array_equal(left[~finite], right[~finite], equal_nan=True):
        return math.inf
    off = np.abs(left[finite] - right[finite]).max(initial=0.0)
    return float(off / max(np.abs(right[finite]).max(initial=0.0), np.finfo(np.float32).tiny))


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()

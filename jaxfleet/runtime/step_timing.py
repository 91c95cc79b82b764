"""Times of a step for its report: of calls with made-up inputs, and the rates of its devices."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from jaxfleet.errors import JaxfleetError
from jaxfleet.report import Measured

_TRIES = 4  # the fastest counts: the first compiles, and other work delays any of them
_SIDES = {"cpu": 512}  # of the matrices of a product; a larger device needs larger ones
_SIDE = 4096
_COPIED = {"cpu": 4 << 20}  # elements of a copy
_COPIED_ELSE = 64 << 20


@dataclass(frozen=True)
class Calls:
    """A step with a state and a batch that nothing else uses.

    Attributes:
        step: of a state and a batch.
        state: the state that the first call takes.
        batch: the batch of all calls.
        note: what the calls do otherwise than those of training.
        of: what the calls run, if it is not all of a step.
    """

    step: Callable[..., Any]
    state: Any
    batch: Any
    note: str = ""
    of: str = ""


def measured(
    devices: Sequence[Any],
    inputs: Callable[[], Calls],
    calls: int,
) -> Measured:
    """Returns the rates of devices and the time of a step.

    Args:
        devices: the step's, all of this process.
        inputs: returns what to call; or raises why there is nothing.
        calls: how often the step is timed, after a call that compiles it.
    """
    flops_per_s, bytes_per_s = _rates(devices)
    device = f"{len(devices)} x {devices[0].device_kind}"
    try:
        made = inputs()
        times = _times(made.step, made.state, made.batch, calls)
    except (JaxfleetError, TypeError, ValueError) as error:
        return Measured(flops_per_s, bytes_per_s, device, why_not=str(error))
    step_s = median(times)
    return Measured(flops_per_s, bytes_per_s, device, step_s, calls, note=made.note, of=made.of)


def _times(step: Callable[..., Any], state: Any, batch: Any, calls: int) -> list[float]:
    found = []
    for _ in range(calls + 1):
        begin = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        found.append(time.perf_counter() - begin)
    return found[1:]


def zeros(types: Any) -> Any:
    """Returns arrays of zeros of these types."""
    return jax.tree_util.tree_map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), types)


def _rates(devices: Sequence[Any]) -> tuple[float, float]:
    """Returns the flops and the bytes a second of one device while all of them work."""
    kind = devices[0].platform
    side, count = _SIDES.get(kind, _SIDE), _COPIED.get(kind, _COPIED_ELSE)
    product, copy = jax.jit(jnp.matmul), jax.jit(jnp.negative)
    matrices = [jax.device_put(jnp.ones((side, side)), device) for device in devices]
    arrays = [jax.device_put(jnp.ones(count), device) for device in devices]
    of_product = _fastest(lambda: [product(matrix, matrix) for matrix in matrices])
    of_copy = _fastest(lambda: [copy(array) for array in arrays])
    return 2 * side**3 / of_product, 2 * 4 * count / of_copy


def _fastest(run: Callable[[], Any]) -> float:
    found = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - begin)
    return min(found)

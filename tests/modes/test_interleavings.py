"""Two trainers in a fixed order of steps, in asynchronous modes, replicated by numpy bit for bit.

The arithmetic leaves no choice of rounding: a trainer has one row, so nothing is summed, and the
rate and the number of trainers are powers of two, so a fused multiplication rounds as two do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.lower import ExecutableCache
from jaxfleet.runtime.simulated_job import Twin
from jaxfleet.transport.memory_network import MemoryNetwork

INPUTS, TRAINERS, RATE = 6, 2, 0.25
CACHE = ExecutableCache()
START = np.linspace(-0.7, 0.9, INPUTS, dtype=np.float32)
# The trainer of each step; the first initializes servers: alternating, in bursts, ...
ORDERS = {
    "turns": (0, 1, 0, 1, 0, 1, 0, 1),
    "bursts": (0, 0, 0, 1, 1, 1, 1, 0),
    "behind": (0, 1, 0, 0, 0, 0, 0, 1),
    "ends": (0, 1, 1, 0, 1, 0, 1, 1),
}
FIRST_S, EVERY_S = 50.0, 10.0  # by the network's clock; an exchange takes no time

Oracle = Callable[[Sequence[int]], list[list[np.ndarray]]]


def batch(number: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(number)
    return {"x": draw.uniform(0.1, 1.5, (TRAINERS, INPUTS)).astype(np.float32)}


def train_step(state: Any, data: Any) -> Any:
    """Shrinks parameters: the gradient is `2 x w`, so it reveals its `w`."""

    def loss(w: Any) -> Any:
        return (data["x"] * jnp.square(w)).sum(1).mean()

    tx = jf.distributed_optimizer(optax.sgd(RATE))
    grad = jax.grad(loss)(state["w"])
    updates, opt = tx.update(grad, state["opt"], state["w"])
    return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, {"used": state["w"]}


def update(w: np.ndarray, number: int, trainer: int) -> np.ndarray:
    """Returns the update of a step, for the parameters of its computation."""
    rate, two = np.float32(RATE), np.float32(2.0)
    taken: np.ndarray = rate * (batch(number)["x"][trainer] * (two * w))
    return taken


def async_oracle(order: Sequence[int]) -> list[list[np.ndarray]]:
    """Returns the parameters of each step: the servers' answer to that trainer's last one."""
    served, count = START, [0] * TRAINERS
    received = [START] * TRAINERS
    found: list[list[np.ndarray]] = [[] for _ in range(TRAINERS)]
    for trainer in order:
        if not count[trainer]:  # a trainer begins with the servers' values
            received[trainer] = served
        found[trainer].append(received[trainer])
        served = served - update(received[trainer], count[trainer], trainer)
        received[trainer] = served
        count[trainer] += 1
    return found


def geo_oracle(k_steps: int) -> Oracle:
    """Returns the oracle of trainers that update locally, and exchange every `k_steps`."""

    def follow(order: Sequence[int]) -> list[list[np.ndarray]]:
        served, count = START, [0] * TRAINERS
        own, old = [START] * TRAINERS, [START] * TRAINERS
        found: list[list[np.ndarray]] = [[] for _ in range(TRAINERS)]
        for trainer in order:
            if not count[trainer]:  # a trainer begins with the servers' values
                own[trainer] = old[trainer] = served
            found[trainer].append(own[trainer])
            w = own[trainer] - update(own[trainer], count[trainer], trainer)
            count[trainer] += 1
            if count[trainer] % k_steps == 0:
                delta = (w - old[trainer]) / np.float32(TRAINERS)
                served = served + delta
                w = w + (served - (old[trainer] + delta))
                old[trainer] = served
            own[trainer] = w
        return found

    return follow


def played(how: str, order: Sequence[int], **options: Any) -> list[list[np.ndarray]]:
    """Trains in an order; returns the parameters of each trainer's steps."""
    network = MemoryNetwork()
    chosen: Any = {"mode": "pserver", "min_block_size": 2, "communication": how, **options}
    strategy = jf.DistributedStrategy(staleness=len(order), **chosen)
    state = {"w": jnp.asarray(START), "opt": optax.sgd(RATE).init({})}
    twin = Twin(train_step, (state, batch(0)), strategy, trainers=TRAINERS, cache=CACHE)

    def script(step: Any) -> Any:
        now, mine = state, step.client.me.trainer
        moments = [FIRST_S + EVERY_S * at for at, trainer in enumerate(order) if trainer == mine]
        used = []
        for number, moment in enumerate(moments):
            network.sleep(moment - network.clock())
            now, metrics = step(now, batch(number))
            used.append(np.asarray(metrics["used"]))
        network.sleep(FIRST_S + EVERY_S * len(order) - network.clock())
        return None, tuple(used)

    return [list(used) for used in twin.play(script, network=network).metrics]


@pytest.mark.few(2)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize(
    ("how", "options", "oracle"),
    [
        ("async", {}, async_oracle),
        ("half_async", {}, async_oracle),
        ("geo", {"k_steps": 2}, geo_oracle(2)),
        ("geo", {"k_steps": 1}, geo_oracle(1)),
    ],
    ids=["async", "half_async", "geo2", "geo1"],
)
def test_every_order_of_steps_gives_what_its_formula_gives(
    how: str, options: Any, oracle: Oracle, order: Sequence[int]
) -> None:
    for found, wanted in zip(played(how, order, **options), oracle(order), strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("oracle", [async_oracle, geo_oracle(2)], ids=["async", "geo"])
def test_orders_differ(oracle: Oracle) -> None:
    # Otherwise the test above would pass for any order of trainers.
    ends = [oracle(ORDERS[name])[1][3] for name in ("turns", "bursts", "ends")]
    assert len({end.tobytes() for end in ends}) == 3

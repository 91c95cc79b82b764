"""Training from `jf.data.Loader` beside a hand-written loop over a stored permutation.

    python benchmarks/data_loader.py [--quick]

Both sides train the same jitted step on one device, with batches of 256 rows out of 20,000 of 784
numbers. The loop shuffles by `numpy.random.Generator.permutation` and indexes the arrays; the
loader computes its order, without and with reading ahead. The bar is 1.10 times the loop, plus the
spread of the loop against itself.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Bar, Plan, Side, compare, print_table, run

import jaxfleet as jf

SAMPLES, FEATURES, ROWS, HIDDEN = 20_000, 784, 256, 512
HEADS = ("", "loop, ms", "loader, ms", "ratio", "loop/itself")


def measure(devices: int, plan: Plan) -> list[Bar]:
    random = np.random.default_rng(0)
    source = {
        "x": random.normal(size=(SAMPLES, FEATURES)).astype(np.float32),
        "y": random.normal(size=SAMPLES).astype(np.float32),
    }
    weights = {
        "w": jnp.asarray(0.03 * random.normal(size=(FEATURES, HIDDEN)), jnp.float32),
        "v": jnp.zeros(HIDDEN),
    }

    @jax.jit
    def train(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss_fn(p: Any) -> jax.Array:
            return jnp.square(jax.nn.relu(batch["x"] @ p["w"]) @ p["v"] - batch["y"]).mean()

        value, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, state, grads), value

    def side(batches: Iterator[Any]) -> Side:
        return Side(lambda state, _: train(state, next(batches)), weights, None)

    bars = []
    for ahead in (0, 2):
        loader = jf.data.Loader(source, ROWS, epochs=None, prefetch=ahead)
        with loader.from_step(0) as batches:
            loop, again = side(by_hand(source)), side(by_hand(source))
            times = compare(loop, side(batches), again, plan)
        what = f"prefetch={ahead}, {devices} device"
        shown = (f"{times.baseline_ms:.2f}", f"{times.candidate_ms:.2f}", f"{times.ratio:.3f}")
        print_table(HEADS, [(what, *shown, "{:.3f} to {:.3f}".format(*times.itself))])
        bars.append(Bar(f"{what}: loader over the loop", times.ratio, 1.10, times.spread))
    return bars


def by_hand(source: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    while True:
        order = random.permutation(SAMPLES)
        for start in range(0, SAMPLES - ROWS + 1, ROWS):
            rows = order[start : start + ROWS]
            yield {name: array[rows] for name, array in source.items()}


if __name__ == "__main__":
    run("data_loader", __file__, measure, device_counts=(1,))

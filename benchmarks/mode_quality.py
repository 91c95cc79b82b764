"""How well each mode trains, with 4 trainers of which some are slower: loss and accuracy on digits.

Runs on the in-process twin, whose network has an order that a seed gives; so the numbers are the
same every time. `python benchmarks/mode_quality.py --seeds 5`.
"""

import argparse
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxfleet as jf
from jaxfleet.lower import ExecutableCache
from jaxfleet.runtime.simulated_job import Twin
from jaxfleet.transport.memory_network import MemoryNetwork

TRAINERS, ROWS, HIDDEN, STEPS = 4, 64, 32, 150
MODES: dict[str, dict[str, Any]] = {
    "sync": {"rate": 0.4},
    "async": {"rate": 0.1},  # four updates, of a quarter of the rows each, replace one
    "half_async": {"rate": 0.2, "merge": 2},
    "dc_asgd": {"rate": 0.1},
    "geo": {"rate": 0.4, "k_steps": 5},
    "fl": {"rate": 0.4, "k_steps": 5},
}


def make_step(rate: float) -> Any:
    tx = jf.distributed_optimizer(optax.sgd(rate))

    def loss_of(params: Any, data: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(
            forward(params, data["x"]), data["y"]
        ).mean()

    def train_step(state: Any, data: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], data)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    return train_step


def forward(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["a"] + params["b"]) @ params["c"] + params["d"]


def start(rate: float, seed: int) -> Any:
    draw = np.random.default_rng(seed)
    params = {
        "a": draw.normal(size=(64, HIDDEN), scale=0.1),
        "b": np.zeros(HIDDEN),
        "c": draw.normal(size=(HIDDEN, 10), scale=0.1),
        "d": np.zeros(10),
    }
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    return {"params": params, "opt": optax.sgd(rate).init(params)}


def accuracy(how: str, seed: int, caches: dict[str, ExecutableCache]) -> tuple[float, Any]:
    """Returns the accuracy on held-out rows, and the staleness of values."""
    options = dict(MODES[how])
    rate = options.pop("rate")
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16.0).astype(np.float32), y.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(x))
    train, held = order[:1400], order[1400:]
    network = MemoryNetwork()
    batches = np.random.default_rng(seed + 1).choice(train, (STEPS, ROWS))
    state = start(rate, seed)

    def script(step: Any) -> Any:
        pace, mine = random.Random(f"{seed} {step.client.me.trainer}"), state
        for rows in batches:
            network.sleep(pace.uniform(0.5, 1.5))
            mine, _ = step(mine, {"x": x[rows], "y": y[rows]})
        return step.pull(mine)["params"], (step.stats()["trainer"].get("staleness"),)

    strategy = jf.DistributedStrategy(mode="pserver", communication=how, **options)  # type: ignore[arg-type]
    example = (state, {"x": x[:ROWS], "y": y[:ROWS]})
    job = Twin(make_step(rate), example, strategy, servers=2, trainers=TRAINERS,
               cache=caches.setdefault(how, ExecutableCache()))  # fmt: skip
    result = job.play(script, network=network)
    right = np.argmax(np.asarray(forward(result.states[-1], x[held])), axis=1) == y[held]
    return float(right.mean()), result.metrics[0][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    caches: dict[str, ExecutableCache] = {}
    for how in MODES:
        found = [accuracy(how, seed, caches) for seed in range(args.seeds)]
        scores = [score for score, _ in found]
        lags = [lag["max"] for _, lag in found if lag is not None]
        shown = " ".join(f"{score:.3f}" for score in scores)
        text = f"{how:10s} accuracy {np.mean(scores):.4f} ({shown})"
        print(text, f"staleness at most {max(lags)}" if lags else "")


if __name__ == "__main__":
    main()

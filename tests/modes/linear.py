"""A linear model whose training in each mode numpy can follow step by step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfleet as jf
from jaxfleet.lower import ExecutableCache
from jaxfleet.runtime.simulated_job import Twin

INPUTS, ROWS, RATE = 6, 8, 0.05
CACHE = ExecutableCache()  # the same blocks compile once for all tests

# float32 is summed in another order than numpy's: some ULPs per step.
CLOSE: Any = {"rtol": 2e-6, "atol": 2e-6}


def start() -> Any:
    return {"w": jnp.linspace(-0.5, 0.5, INPUTS), "opt": sgd().init({})}


def sgd() -> optax.GradientTransformation:
    return optax.sgd(RATE)


def batch(number: int) -> Any:
    draw = np.random.default_rng(number)
    x = draw.normal(size=(ROWS, INPUTS)).astype(np.float32)
    return {"x": x, "y": np.tanh(x.sum(axis=1))}


def train_step(state: Any, data: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.square(data["x"] @ w - data["y"]).mean()

    value, grad = jax.value_and_grad(loss)(state["w"])
    updates, opt = jf.distributed_optimizer(sgd()).update(grad, state["opt"], state["w"])
    return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, {"loss": value}


def gradient(w: np.ndarray, data: Any, trainer: int = 0, trainers: int = 1) -> np.ndarray:
    """Returns a trainer's gradient by numpy, for its rows of the batch."""
    rows = len(data["y"])
    own = slice(trainer * rows // trainers, (trainer + 1) * rows // trainers)
    x, y = data["x"][own].astype(np.float64), data["y"][own].astype(np.float64)
    return 2.0 / len(y) * x.T @ (x @ w - y)


def first() -> np.ndarray:
    """Returns the initial parameters, in numpy's precision."""
    return np.asarray(start()["w"], np.float64)


def twin(how: str, *, trainers: int = 1, servers: int = 2, **options: Any) -> Twin:
    chosen: Any = {"mode": "pserver", "min_block_size": 2, "communication": how, **options}
    strategy = jf.DistributedStrategy(**chosen)
    example = (start(), batch(0))
    return Twin(train_step, example, strategy, servers=servers, trainers=trainers, cache=CACHE)


def trained(
    how: str, steps: int, *, trainers: int = 1, pulls: bool = False, **options: Any
) -> tuple[list[np.ndarray], list[Any]]:
    """Trains; returns each trainer's final parameters, and the staleness of its values.

    Args:
        how: the mode.
        steps: the number of steps.
        trainers: the number of trainers.
        pulls: return the servers' parameters instead of the trainer's own.
        options: of the strategy.
    """

    def script(step: Any) -> Any:
        state = start()
        for number in range(steps):
            state, _ = step(state, batch(number))
        state = step.pull(state) if pulls else state
        own = np.asarray(state["w"])
        return own, (step.stats()["trainer"].get("staleness"),)

    result = twin(how, trainers=trainers, **options).play(script)
    return list(result.states), [stats for (stats,) in result.metrics]

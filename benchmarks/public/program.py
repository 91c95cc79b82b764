"""What a benchmarked program is, and the usual way to make one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

Wrap = Callable[[Any], Any]
TrainStep = Callable[[Any, Any], tuple[Any, Any]]
ROWS = 64


@dataclass(frozen=True)
class Program:
    """A training step, made with a wrapper of its optimizer, with where it starts."""

    name: str
    make: Callable[[Wrap], TrainStep]
    state: Any
    batch: Any


def trained(name: str, loss: Any, params: Any, batch: Any, optimizer: Any) -> Program:
    """Returns a program that trains all of `params` by the gradient of `loss(params, batch)`."""

    def make(wrap: Wrap) -> TrainStep:
        tx = wrap(optimizer)

        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            value, grads = jax.value_and_grad(loss)(state["params"], batch)
            return updated(tx, state, grads), value

        return train_step

    return Program(name, make, started(optimizer, params), batch)


def started(tx: Any, params: Any, **more: Any) -> dict[str, Any]:
    """Returns the state that a program begins with."""
    return {"params": params, "opt": tx.init(params), **more}


def updated(tx: Any, state: Any, grads: Any, **extra: Any) -> dict[str, Any]:
    """Returns the state after one update, its other entries as they were."""
    updates, opt = tx.update(grads, state["opt"], state["params"], **extra)
    return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}


def drawn(*shape: int, seed: int = 1) -> np.ndarray:
    """Returns float32 numbers of the normal distribution."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def numbers(below: int, *shape: int, seed: int = 1) -> np.ndarray:
    """Returns int32 numbers from 0 up to a bound."""
    return np.random.default_rng(seed).integers(0, below, shape).astype(np.int32)

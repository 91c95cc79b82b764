"""A benchmarked program, and helpers to build one."""

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
    """A training step, with a wrapper of its optimizer and its initial state."""

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
    """Returns a program's initial state."""
    return {"params": params, "opt": tx.init(params), **more}


def updated(tx: Any, state: Any, grads: Any, **extra: Any) -> dict[str, Any]:
    """Returns the state after one update, other entries unchanged."""
    updates, opt = tx.update(grads, state["opt"], state["params"], **extra)
    return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}


def drawn(*shape: int, seed: int = 1) -> np.ndarray:
    """Returns normally distributed float32 numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def numbers(below: int, *shape: int, seed: int = 1) -> np.ndarray:
    """Returns int32 numbers in [0, `below`)."""
    return np.random.default_rng(seed).integers(0, below, shape).astype(np.int32)

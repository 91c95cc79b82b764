"""The form of a zoo entry: a training program written for one device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax

Wrap = Callable[[optax.GradientTransformation], optax.GradientTransformation]
"""What stands around the user's optimizer: the marker of the compiler, or the identity."""

Loss = Callable[[Any, Any], tuple[jax.Array, dict[str, Any]]]
"""A loss with metrics: (params, batch) -> (loss, metrics)."""

TRAITS = {
    "core": "one of the twelve kinds of program whose equality on N devices is shown at length",
    "batchnorm": "the state holds statistics of the batch",
    "random": "draws random numbers whose shape has the batch in it",
    "device_keys": "draws so that N devices draw other numbers: a key a row, another generator",
    "row_outputs": "a metric has one row for each row of the batch",
    "int_metrics": "a metric is an integer or a boolean",
    "crosses_rows": "a row's loss depends on other rows by more than sums over the batch",
    "low_precision": "computes below float32: compare with a wider tolerance",
    "two_optimizers": "wraps and updates two optimizers",
    "marker_inside": "the wrapped optimizer runs inside another: in a branch, or after other parts",
    "no_symbolic": "cannot be traced with a letter as the batch size",
    "size_branch": "traced with a letter, takes one side of a Python branch on the size in silence",
}
"""Every trait an entry may have, and what it says."""


@dataclass(frozen=True)
class Built:
    """A runnable program: `train_step(state, batch(step, rows))`.

    `train_step` is pure and not jitted. `state` is any pytree of arrays. `batch` is deterministic:
    equal steps and numbers of rows give equal numpy arrays.
    """

    state: Any
    train_step: Callable[[Any, Any], tuple[Any, Any]]
    batch: Callable[[int, int], Any]


@dataclass(frozen=True)
class Case:
    """An entry: the builder of a program around a wrapped optimizer, and its traits."""

    name: str
    build: Callable[[Wrap], Built]
    rows: int = 16  # of the whole batch; divisible by 8
    traits: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = self.traits - TRAITS.keys()
        assert not unknown, f"zoo: '{self.name}' has unknown traits {sorted(unknown)}"
        assert self.rows % 8 == 0, f"zoo: '{self.name}' has {self.rows} rows, not a multiple of 8"


def case(name: str, build: Callable[[Wrap], Built], *traits: str, rows: int = 16) -> Case:
    """Makes an entry; the traits follow the builder."""
    return Case(name, build, rows, frozenset(traits))


def identity(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimizer unchanged: the program on one device."""
    return tx


def plain_program(
    tx: optax.GradientTransformation, params: Any, loss: Loss, batch: Callable[[int, int], Any]
) -> Built:
    """Builds the most common program: a dict as state, one gradient, one update."""

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        (value, metrics), grads = value_and_grad(state["params"], batch)
        return updated(tx, state, grads), {"loss": value, **metrics}

    return Built({"params": params, "opt_state": tx.init(params)}, train_step, batch)


def updated(tx: optax.GradientTransformation, state: dict[str, Any], grads: Any) -> dict[str, Any]:
    """Returns the state after one update, with other entries unchanged."""
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {**state, "params": params, "opt_state": opt_state}

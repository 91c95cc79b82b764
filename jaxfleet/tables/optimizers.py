"""Row optimizers: the columns that each one keeps, and its update.

Untouched rows keep their state: `momentum`, `rmsprop` and `adam` are lazy. The loops over rows are
in `optimizer_kernels`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables import optimizer_kernels
from jaxfleet.tables.columns import Columns, Kind
from jaxfleet.tables.spec import (
    Adagrad,
    Adam,
    DownpourAdagrad,
    DownpourAdam,
    Momentum,
    Part,
    Rmsprop,
    Sgd,
    Summary,
)

ROWS = "rows"


@dataclass(frozen=True)
class State:
    """A column of an optimizer, and its initial value."""

    kind: Kind
    initial: float = 0.0


Apply = Callable[[Columns, np.ndarray, np.ndarray, np.float32], None]


@dataclass(frozen=True)
class Update:
    """A ready-to-run optimizer.

    Attributes:
        state: its columns, by name.
        learning_rate: default for pushes that carry none.
        apply: updates slots (int32[n]) of columns by gradients (float32[n, dim]) at a rate.
    """

    state: Mapping[str, State]
    learning_rate: float
    apply: Apply


def update_of(optimizer: Part, dim: int) -> Update:
    """Returns the update of an optimizer for rows of `dim` elements; rejects other parts."""
    row = Kind(np.float32, dim)
    match optimizer:
        case Sgd(rate):
            return Update({}, rate, _by_sgd)
        case Momentum(rate):
            return Update({"velocity": State(row)}, rate, _by_momentum(optimizer))
        case Adagrad(rate, initial):
            return Update({"moment": State(row, initial)}, rate, _by_adagrad(optimizer))
        case Rmsprop(rate):
            return Update({"mean_square": State(row)}, rate, _by_rmsprop(optimizer))
        case Adam(rate):
            state = {"moment1": State(row), "moment2": State(row), "steps": State(Kind(np.int32))}
            return Update(state, rate, _by_adam(optimizer))
        case DownpourAdagrad(rate):
            state = {"sum": State(Kind(np.float32))}
            return Update(state, rate, _by_downpour_adagrad(optimizer))
        case DownpourAdam(rate):
            state = {"square": State(row), "speed": State(row), "steps": State(Kind(np.float32))}
            return Update(state, rate, _by_downpour_adam(optimizer))
        case Summary():
            return Update({}, 1.0, _by_summary(optimizer))
        case _:
            raise ProgramError(f"a table's rows cannot be updated by {optimizer!r}")


def add_rows(columns: Columns, slots: np.ndarray, deltas: np.ndarray) -> None:
    """Adds to rows: `row += delta`."""
    rows = columns[ROWS]
    optimizer_kernels.sgd(rows.addresses, rows.shift, slots, deltas, np.float32(-1.0))


def _by_sgd(columns: Columns, slots: np.ndarray, grads: np.ndarray, rate: np.float32) -> None:
    rows = columns[ROWS]
    optimizer_kernels.sgd(rows.addresses, rows.shift, slots, grads, rate)


def _by_momentum(momentum: Momentum) -> Apply:
    decay, nesterov = np.float32(momentum.momentum), int(momentum.nesterov)

    def apply(columns: Columns, slots: np.ndarray, grads: np.ndarray, rate: np.float32) -> None:
        rows, velocity = columns[ROWS], columns["velocity"].addresses
        optimizer_kernels.momentum(
            rows.addresses, velocity, rows.shift, slots, grads, rate, decay, nesterov
        )

    return apply


def _by_adagrad(adagrad: Adagrad) -> Apply:
    epsilon, zero = np.float32(adagrad.epsilon), np.float32(0)
    inside, outside = (zero, epsilon) if adagrad.epsilon_outside else (epsilon, zero)

    def apply(columns: Columns, slots: np.ndarray, grads: np.ndarray, rate: np.float32) -> None:
        rows, moment = columns[ROWS], columns["moment"].addresses
        optimizer_kernels.adagrad(
            rows.addresses, moment, rows.shift, slots, grads, rate, inside, outside
        )

    return apply


def _by_rmsprop(rmsprop: Rmsprop) -> Apply:
    decay, rest = np.float32(rmsprop.decay), np.float32(1 - rmsprop.decay)
    epsilon = np.float32(rmsprop.epsilon)

    def apply(columns: Columns, slots: np.ndarray, grads: np.ndarray, rate: np.float32) -> None:
        rows, square = columns[ROWS], columns["mean_square"].addresses
        optimizer_kernels.rmsprop(
            rows.addresses, square, rows.shift, slots, grads, rate, decay, rest, epsilon
        )

    return apply


def _by_adam(adam: Adam) -> Apply:
    betas, epsilon = (adam.beta1, adam.beta2), np.float32(adam.epsilon)

    def apply(columns: Columns, slots: np.ndarray, grads: np.ndarray, rate: np.float32) -> None:
        names = (ROWS, "moment1", "moment2", "steps")
        rows, first, second, steps = (columns[name].addresses for name in names)
        shift = columns[ROWS].shift
        optimizer_kernels.adam(
            rows, first, second, steps, shift, slots, grads, rate, *betas, epsilon
        )

    return apply


def _by_downpour_adagrad(adagrad: DownpourAdagrad) -> Apply:
    numbers = (np.float32(adagrad.initial), np.float32(adagrad.low), np.float32(adagrad.high))

    def apply(columns: Columns, slots: np.ndarray, grads: np.ndarray, rate: np.float32) -> None:
        rows, sums = columns[ROWS], columns["sum"].addresses
        optimizer_kernels.downpour_adagrad(
            rows.addresses, sums, rows.shift, slots, grads, rate, *numbers
        )

    return apply


def _by_downpour_adam(adam: DownpourAdam) -> Apply:
    numbers = (np.float32(adam.keep), np.float32(adam.momentum), np.float32(adam.epsilon))

    def apply(columns: Columns, slots: np.ndarray, grads: np.ndarray, rate: np.float32) -> None:
        names = (ROWS, "square", "speed", "steps")
        rows, square, speed, steps = (columns[name].addresses for name in names)
        shift = columns[ROWS].shift
        optimizer_kernels.downpour_adam(
            rows, square, speed, steps, shift, slots, grads, rate, *numbers
        )

    return apply


def _by_summary(summary: Summary) -> Apply:
    keep = np.float32(summary.keep)

    def apply(columns: Columns, slots: np.ndarray, grads: np.ndarray, _: np.float32) -> None:
        rows = columns[ROWS]
        optimizer_kernels.summary(rows.addresses, rows.shift, slots, grads, keep)

    return apply

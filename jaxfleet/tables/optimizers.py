"""Row optimizers: the columns that each one keeps, and its compiled loop over the touched rows.

Untouched rows keep their state: `momentum`, `rmsprop` and `adam` are lazy. The arithmetic is
float32, operation by operation in the order of the formula, so it matches numpy to the bit.

A loop takes the addresses of the chunks of the rows and of each column of state, the columns'
`shift`, slots (int32[n]), gradients (float32[n, dim]), the learning rate, and the optimizer's own
numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.columns import Columns, Kind, slot_address
from jaxfleet.tables.numba_jit import compiled, floats_at, inlined, words_at
from jaxfleet.tables.optimizer_parts import (
    Adagrad,
    Adam,
    DownpourAdagrad,
    DownpourAdam,
    Momentum,
    Rmsprop,
    Sgd,
    Summary,
)
from jaxfleet.tables.validation import Part

ROWS = "rows"


@dataclass(frozen=True)
class State:
    """A column of an optimizer, and its initial value."""

    kind: Kind
    initial: float = 0.0


@dataclass(frozen=True)
class Update:
    """A ready-to-run optimizer.

    Attributes:
        learning_rate: default for pushes that carry none.
        state: its columns by name, in the order of the loop's arguments.
        numbers: the last arguments of the loop.
    """

    learning_rate: float
    loop: Callable[..., None]
    state: Mapping[str, State]
    numbers: tuple[float | np.float32, ...] = ()

    def apply(
        self, columns: Columns, slots: np.ndarray, grads: np.ndarray, rate: np.float32
    ) -> None:
        """Updates the rows and the state of slots."""
        addresses = [columns[name].addresses for name in (ROWS, *self.state)]
        self.loop(*addresses, columns[ROWS].shift, slots, grads, rate, *self.numbers)


def update_of(optimizer: Part, dim: int) -> Update:
    """Returns the update of an optimizer for rows of `dim` elements; rejects other parts."""
    row, f32 = Kind(np.float32, dim), np.float32
    numbers: tuple[np.float32, ...]
    match optimizer:
        case Sgd(rate):
            return Update(rate, _sgd, {})
        case Momentum(rate, decay, nesterov):
            return Update(rate, _momentum, {"velocity": State(row)}, (f32(decay), int(nesterov)))
        case Adagrad(rate, initial, epsilon, is_outside):
            numbers = (f32(0), f32(epsilon)) if is_outside else (f32(epsilon), f32(0))
            return Update(rate, _adagrad, {"moment": State(row, initial)}, numbers)
        case Rmsprop(rate, decay, epsilon):
            numbers = (f32(decay), f32(1 - decay), f32(epsilon))
            return Update(rate, _rmsprop, {"mean_square": State(row)}, numbers)
        case Adam(rate, beta1, beta2, epsilon):
            state = {"moment1": State(row), "moment2": State(row), "steps": State(Kind(np.int32))}
            return Update(rate, _adam, state, (beta1, beta2, f32(epsilon)))
        case DownpourAdagrad(rate, initial, low, high):
            numbers = (f32(initial), f32(low), f32(high))
            return Update(rate, _downpour_adagrad, {"sum": State(Kind(f32))}, numbers)
        case DownpourAdam(rate, keep, decay, epsilon):
            state = {"square": State(row), "speed": State(row), "steps": State(Kind(f32))}
            return Update(rate, _downpour_adam, state, (f32(keep), f32(decay), f32(epsilon)))
        case Summary(keep):
            return Update(1.0, _summary, {}, (f32(keep),))
        case _:
            raise ProgramError(f"a table's rows cannot be updated by {optimizer!r}")


def add_rows(columns: Columns, slots: np.ndarray, deltas: np.ndarray) -> None:
    """Adds to rows: `row += delta`."""
    rows = columns[ROWS]
    _sgd(rows.addresses, rows.shift, slots, deltas, np.float32(-1.0))


@compiled("u64[]", "i64", "i32[]", "f32[,]", "f32")
def _sgd(
    addresses: np.ndarray, shift: int, slots: np.ndarray, grads: np.ndarray, rate: np.float32
) -> None:
    dim = grads.shape[1]
    for i in range(len(slots)):
        row = floats_at(slot_address(addresses, shift, dim, np.int64(slots[i])))
        for j in range(dim):
            row[j] -= rate * grads[i, j]


@compiled("u64[]", "u64[]", "i64", "i32[]", "f32[,]", "f32", "f32", "i64")
def _momentum(
    addresses: np.ndarray,
    velocities: np.ndarray,
    shift: int,
    slots: np.ndarray,
    grads: np.ndarray,
    rate: np.float32,
    decay: np.float32,
    nesterov: int,
) -> None:
    dim = grads.shape[1]
    for i in range(len(slots)):
        slot = np.int64(slots[i])
        row = floats_at(slot_address(addresses, shift, dim, slot))
        velocity = floats_at(slot_address(velocities, shift, dim, slot))
        for j in range(dim):
            grad = grads[i, j]
            moved = decay * velocity[j] + grad
            velocity[j] = moved
            row[j] -= rate * (decay * moved + grad if nesterov else moved)


@compiled("u64[]", "u64[]", "i64", "i32[]", "f32[,]", "f32", "f32", "f32")
def _adagrad(
    addresses: np.ndarray,
    moments: np.ndarray,
    shift: int,
    slots: np.ndarray,
    grads: np.ndarray,
    rate: np.float32,
    inside: np.float32,
    outside: np.float32,
) -> None:
    """Applies `Adagrad`; one of `inside` and `outside` is its epsilon."""
    dim = grads.shape[1]
    for i in range(len(slots)):
        slot = np.int64(slots[i])
        row = floats_at(slot_address(addresses, shift, dim, slot))
        moment = floats_at(slot_address(moments, shift, dim, slot))
        for j in range(dim):
            grad = grads[i, j]
            total = moment[j] + grad * grad
            moment[j] = total
            root = np.sqrt(total + inside) + outside
            # As optax: no update while the sum is zero.
            row[j] -= rate * grad / root if root > 0 else np.float32(0)


@compiled("u64[]", "u64[]", "i64", "i32[]", "f32[,]", "f32", "f32", "f32", "f32")
def _rmsprop(
    addresses: np.ndarray,
    squares: np.ndarray,
    shift: int,
    slots: np.ndarray,
    grads: np.ndarray,
    rate: np.float32,
    decay: np.float32,
    rest: np.float32,
    epsilon: np.float32,
) -> None:
    """Applies `Rmsprop`; `rest` is `1 - decay`."""
    dim = grads.shape[1]
    for i in range(len(slots)):
        slot = np.int64(slots[i])
        row = floats_at(slot_address(addresses, shift, dim, slot))
        square = floats_at(slot_address(squares, shift, dim, slot))
        for j in range(dim):
            grad = grads[i, j]
            mean = decay * square[j] + rest * (grad * grad)
            square[j] = mean
            row[j] -= rate * grad / np.sqrt(mean + epsilon)


@inlined
def _power(base: float, exponent: int) -> float:
    """Power by squaring: the same to the bit with any mathematics library."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@compiled(
    *("u64[]", "u64[]", "u64[]", "u64[]", "i64", "i32[]", "f32[,]"), *("f32", "f64", "f64", "f32")
)
def _adam(
    addresses: np.ndarray,
    firsts: np.ndarray,
    seconds: np.ndarray,
    counts: np.ndarray,
    shift: int,
    slots: np.ndarray,
    grads: np.ndarray,
    rate: np.float32,
    beta1: float,
    beta2: float,
    epsilon: np.float32,
) -> None:
    dim = grads.shape[1]
    keep1, keep2 = np.float32(beta1), np.float32(beta2)
    take1, take2 = np.float32(1.0 - beta1), np.float32(1.0 - beta2)
    before, whole1, whole2 = np.int32(0), np.float32(1), np.float32(1)
    for i in range(len(slots)):
        slot = np.int64(slots[i])
        steps = words_at(slot_address(counts, shift, 1, slot))
        steps[0] += 1
        if steps[0] != before:  # many rows share the previous row's step count
            before = steps[0]
            whole1 = np.float32(1.0 - _power(beta1, np.int64(before)))
            whole2 = np.float32(1.0 - _power(beta2, np.int64(before)))
        row = floats_at(slot_address(addresses, shift, dim, slot))
        first = floats_at(slot_address(firsts, shift, dim, slot))
        second = floats_at(slot_address(seconds, shift, dim, slot))
        for j in range(dim):
            grad = grads[i, j]
            mean = keep1 * first[j] + take1 * grad
            square = keep2 * second[j] + take2 * (grad * grad)
            first[j] = mean
            second[j] = square
            row[j] -= rate * (mean / whole1) / (np.sqrt(square / whole2) + epsilon)


@compiled("u64[]", "u64[]", "i64", "i32[]", "f32[,]", "f32", "f32", "f32", "f32")
def _downpour_adagrad(
    addresses: np.ndarray,
    sums: np.ndarray,
    shift: int,
    slots: np.ndarray,
    grads: np.ndarray,
    rate: np.float32,
    initial: np.float32,
    low: np.float32,
    high: np.float32,
) -> None:
    dim = grads.shape[1]
    for i in range(len(slots)):
        slot = np.int64(slots[i])
        row = floats_at(slot_address(addresses, shift, dim, slot))
        total = floats_at(slot_address(sums, shift, 1, slot))
        own = rate * np.sqrt(initial / (initial + total[0]))
        squares = np.float32(0)
        for j in range(dim):
            grad = grads[i, j]
            row[j] = min(max(row[j] - own * grad, low), high)
            squares += grad * grad
        total[0] += squares / np.float32(dim)


@compiled("u64[]", "u64[]", "u64[]", "u64[]", "i64", "i32[]", "f32[,]", "f32", "f32", "f32", "f32")
def _downpour_adam(
    addresses: np.ndarray,
    squares: np.ndarray,
    speeds: np.ndarray,
    counts: np.ndarray,
    shift: int,
    slots: np.ndarray,
    grads: np.ndarray,
    rate: np.float32,
    keep: np.float32,
    momentum: np.float32,
    epsilon: np.float32,
) -> None:
    dim, one = grads.shape[1], np.float32(1.0)
    for i in range(len(slots)):
        slot = np.int64(slots[i])
        steps = floats_at(slot_address(counts, shift, 1, slot))
        steps[0] = keep * steps[0] + one
        least = steps[0] * epsilon
        row = floats_at(slot_address(addresses, shift, dim, slot))
        square = floats_at(slot_address(squares, shift, dim, slot))
        speed = floats_at(slot_address(speeds, shift, dim, slot))
        for j in range(dim):
            grad = grads[i, j]
            square[j] = keep * square[j] + grad * grad
            speed[j] = momentum * speed[j] + (one - momentum) * grad
            row[j] -= rate * np.sqrt((steps[0] + least) / (square[j] + least)) * speed[j]


@compiled("u64[]", "i64", "i32[]", "f32[,]", "f32", "f32")
def _summary(
    addresses: np.ndarray,
    shift: int,
    slots: np.ndarray,
    grads: np.ndarray,
    _rate: np.float32,
    keep: np.float32,
) -> None:
    dim = grads.shape[1]
    for i in range(len(slots)):
        row = floats_at(slot_address(addresses, shift, dim, np.int64(slots[i])))
        for j in range(dim):
            row[j] = keep * row[j] + grads[i, j]

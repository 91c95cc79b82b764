"""What a gradient does to its row: one compiled loop for each optimizer, over touched rows alone.

The arithmetic is float32, operation by operation in the order of the formula, so it is numpy's to
the bit. Rows that are not touched keep their state: `momentum`, `rmsprop` and `adam` are lazy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.compiled import compiled, floats_at, inlined, words_at
from jaxfleet.tables.rows import Columns, Kind, slot_address
from jaxfleet.tables.spec import Adagrad, Adam, DownpourAdam, Momentum, Part, Rmsprop, Sgd, Summary

ROWS = "rows"


@dataclass(frozen=True)
class State:
    """A column of an optimizer: what a slot holds, and what a new row has in it."""

    kind: Kind
    initial: float = 0.0


Apply = Callable[[Columns, np.ndarray, np.ndarray, np.float32], None]


@dataclass(frozen=True)
class Update:
    """An optimizer, ready to run.

    Attributes:
        state: its columns, by name.
        learning_rate: where a push brings none.
        apply: updates slots (int32[n]) of columns by gradients (float32[n, dim]) at a rate.
    """

    state: Mapping[str, State]
    learning_rate: float
    apply: Apply


def update_of(optimizer: Part, dim: int) -> Update:
    """Returns how an optimizer updates rows of so many elements.

    Raises:
        ProgramError: it is none.
    """
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
    _sgd(rows.addresses, rows.shift, slots, deltas, np.float32(-1.0))


def _by_sgd(columns: Columns, slots: np.ndarray, grads: np.ndarray, rate: np.float32) -> None:
    rows = columns[ROWS]
    _sgd(rows.addresses, rows.shift, slots, grads, rate)


def _by_momentum(momentum: Momentum) -> Apply:
    decay, nesterov = np.float32(momentum.momentum), int(momentum.nesterov)

    def apply(columns: Columns, slots: np.ndarray, grads: np.ndarray, rate: np.float32) -> None:
        rows, velocity = columns[ROWS], columns["velocity"].addresses
        _momentum(rows.addresses, velocity, rows.shift, slots, grads, rate, decay, nesterov)

    return apply


def _by_adagrad(adagrad: Adagrad) -> Apply:
    epsilon, zero = np.float32(adagrad.epsilon), np.float32(0)
    inside, outside = (zero, epsilon) if adagrad.epsilon_outside else (epsilon, zero)

    def apply(columns: Columns, slots: np.ndarray, grads: np.ndarray, rate: np.float32) -> None:
        rows, moment = columns[ROWS], columns["moment"].addresses
        _adagrad(rows.addresses, moment, rows.shift, slots, grads, rate, inside, outside)

    return apply


def _by_rmsprop(rmsprop: Rmsprop) -> Apply:
    decay, rest = np.float32(rmsprop.decay), np.float32(1 - rmsprop.decay)
    epsilon = np.float32(rmsprop.epsilon)

    def apply(columns: Columns, slots: np.ndarray, grads: np.ndarray, rate: np.float32) -> None:
        rows, square = columns[ROWS], columns["mean_square"].addresses
        _rmsprop(rows.addresses, square, rows.shift, slots, grads, rate, decay, rest, epsilon)

    return apply


def _by_adam(adam: Adam) -> Apply:
    betas, epsilon = (adam.beta1, adam.beta2), np.float32(adam.epsilon)

    def apply(columns: Columns, slots: np.ndarray, grads: np.ndarray, rate: np.float32) -> None:
        names = (ROWS, "moment1", "moment2", "steps")
        rows, first, second, steps = (columns[name].addresses for name in names)
        shift = columns[ROWS].shift
        _adam(rows, first, second, steps, shift, slots, grads, rate, *betas, epsilon)

    return apply


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
            # As optax: where nothing but zeros ever came there is nothing to divide by.
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
    """Returns a power by squaring: the same to the bit whatever mathematics library there is."""
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
        if steps[0] != before:  # many rows have taken as many steps as the one before
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


def _by_downpour_adam(adam: DownpourAdam) -> Apply:
    numbers = (np.float32(adam.keep), np.float32(adam.momentum), np.float32(adam.epsilon))

    def apply(columns: Columns, slots: np.ndarray, grads: np.ndarray, rate: np.float32) -> None:
        names = (ROWS, "square", "speed", "steps")
        rows, square, speed, steps = (columns[name].addresses for name in names)
        shift = columns[ROWS].shift
        _downpour_adam(rows, square, speed, steps, shift, slots, grads, rate, *numbers)

    return apply


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


def _by_summary(summary: Summary) -> Apply:
    keep = np.float32(summary.keep)

    def apply(columns: Columns, slots: np.ndarray, grads: np.ndarray, _: np.float32) -> None:
        rows = columns[ROWS]
        _summary(rows.addresses, rows.shift, slots, grads, keep)

    return apply


@compiled("u64[]", "i64", "i32[]", "f32[,]", "f32")
def _summary(
    addresses: np.ndarray, shift: int, slots: np.ndarray, grads: np.ndarray, keep: np.float32
) -> None:
    dim = grads.shape[1]
    for i in range(len(slots)):
        row = floats_at(slot_address(addresses, shift, dim, np.int64(slots[i])))
        for j in range(dim):
            row[j] = keep * row[j] + grads[i, j]


def not_finite(grads: np.ndarray) -> np.ndarray:
    """Returns int64[m], the places of rows that have an element that is not finite.

    Args:
        grads: float32[n, dim], contiguous.
    """
    places = np.empty(len(grads), np.int64)
    return places[: _not_finite(grads.view(np.int32), places)]


@compiled("i32[,]", "i64[]!")
def _not_finite(words: np.ndarray, places: np.ndarray) -> int:
    count = 0
    for i in range(len(words)):
        odd = False
        for j in range(words.shape[1]):  # on bits, as sums of floats are not vectorized
            odd |= (words[i, j] & 0x7F800000) == 0x7F800000
        if odd:
            places[count] = i
            count += 1
    return count

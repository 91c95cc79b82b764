"""Initial rows: a pure function of the key, the element and the seed.

Without a generator's state, the result does not depend on which server makes a row, when, or after
which others. Only operations that IEEE 754 defines to the bit are used (the logarithm is computed
here, as libraries differ), so every machine agrees.
"""

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.buckets import GOLDEN, mixed
from jaxfleet.tables.numba_jit import compiled, inlined
from jaxfleet.tables.spec import Constant, Normal, Uniform
from jaxfleet.tables.validation import Part

_SQRT_HALF = 0.7071067811865476
_LN_2 = 0.6931471805599453


def initial_rows(initializer: Part, keys: np.ndarray, dim: int) -> np.ndarray:
    """Returns float32[n, dim], the initial rows of int64[n] keys; rejects other parts of a spec."""
    match initializer:
        case Constant(value):
            return np.full((len(keys), dim), value, np.float32)
        case Uniform(low, high, seed):
            rows = np.empty((len(keys), dim), np.float32)
            _uniform(keys, seed, low, high, rows)
            below = np.nextafter(np.float32(high), np.float32(low))  # rounding may reach `high`
            return np.minimum(rows, below, out=rows) if high > low else rows
        case Normal(mean, stddev, seed):
            rows = np.empty((len(keys), dim), np.float32)
            _normal(keys, seed, mean, stddev, rows)
            return rows
        case _:
            raise ProgramError(f"a row cannot begin with {initializer!r}")


@inlined
def _bits(begin: np.uint64, element: int) -> np.uint64:
    """Returns the 32 bits of an element: two elements share the 64 of one mix."""
    pair = mixed(begin + np.uint64(element >> 1) * GOLDEN)
    return (pair >> np.uint64(32)) if element & 1 else (pair & np.uint64(0xFFFFFFFF))


@inlined
def _begin(key: np.int64, seed: int) -> np.uint64:
    return mixed(np.uint64(key) ^ mixed(np.uint64(seed)))


@compiled("i64[]", "i64", "f64", "f64", "f32[,]!")
def _uniform(keys: np.ndarray, seed: int, low: float, high: float, rows: np.ndarray) -> None:
    for i in range(len(keys)):
        begin = _begin(keys[i], seed)
        for j in range(rows.shape[1]):
            part = np.float64(_bits(begin, j)) * 2.0**-32
            rows[i, j] = np.float32(low + (high - low) * part)


@compiled("i64[]", "i64", "f64", "f64", "f32[,]!")
def _normal(keys: np.ndarray, seed: int, mean: float, stddev: float, rows: np.ndarray) -> None:
    for i in range(len(keys)):
        begin = _begin(keys[i], seed)
        for j in range(rows.shape[1]):
            part = (np.float64(_bits(begin, j)) + 0.5) * 2.0**-32
            rows[i, j] = np.float32(mean + stddev * _quantile(part))


@inlined
def _quantile(part: float) -> float:
    """Quantile function of the normal distribution, to seven digits.

    PPND7 of algorithm AS 241 (Wichura: The percentage points of the normal distribution, 1988).
    """
    q = part - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        over = ((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179
        under = ((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0
        return q * over / under
    r = np.sqrt(-_log(part if q < 0 else 1.0 - part))
    if r <= 5:
        r -= 1.6
        over = ((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777
        under = (0.12021132975 * r + 0.73700164250) * r + 1.0
    else:
        r -= 5.0
        over = ((0.017337203997 * r + 0.42868294337) * r + 3.0812263860) * r + 6.6579051150
        under = (0.012258202635 * r + 0.24197894225) * r + 1.0
    return -over / under if q < 0 else over / under


@inlined
def _log(value: float) -> float:
    """Natural logarithm of a number from 2**-40 to 1, to eleven digits."""
    exponent = 0
    while value < _SQRT_HALF:
        value *= 2.0
        exponent += 1
    s = (value - 1.0) / (value + 1.0)  # ln(value) = 2 atanh(s)
    square, power, total = s * s, s, 0.0
    for odd in range(1, 17, 2):
        total += power / odd
        power *= square
    return 2.0 * total - exponent * _LN_2

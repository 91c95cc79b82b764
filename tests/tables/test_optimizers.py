"""Each optimizer against its formula in numpy, bit for bit; and against optax, dense."""

from collections.abc import Callable

import numpy as np
import optax
import pytest

from jaxfleet.tables import (
    Adagrad,
    Adam,
    Constant,
    DownpourAdagrad,
    DownpourAdam,
    Momentum,
    Rmsprop,
    Sgd,
    Summary,
    TableSpec,
    TableStore,
    Uniform,
)
from jaxfleet.tables.validation import Part

F = np.float32
DIM, KEYS, STEPS = 7, 50, 12
RANDOM = np.random.default_rng(0)

State = dict[str, np.ndarray]
Formula = Callable[[np.ndarray, np.ndarray, State, int], np.ndarray]  # row, gradient, state, step


def sgd(row: np.ndarray, g: np.ndarray, s: State, t: int) -> np.ndarray:
    return row - F(0.3) * g


def momentum(row: np.ndarray, g: np.ndarray, s: State, t: int) -> np.ndarray:
    s["v"] = F(0.8) * s.get("v", F(0)) + g
    return row - F(0.3) * s["v"]


def nesterov(row: np.ndarray, g: np.ndarray, s: State, t: int) -> np.ndarray:
    s["v"] = F(0.8) * s.get("v", F(0)) + g
    return row - F(0.3) * (F(0.8) * s["v"] + g)


def adagrad(row: np.ndarray, g: np.ndarray, s: State, t: int) -> np.ndarray:
    s["s"] = s.get("s", F(0.1)) + g * g
    return row - F(0.3) * g / np.sqrt(s["s"] + F(1e-7))


def adagrad_of_fluid(row: np.ndarray, g: np.ndarray, s: State, t: int) -> np.ndarray:
    s["s"] = s.get("s", F(0)) + g * g
    return row - F(0.3) * g / (np.sqrt(s["s"]) + F(1e-6))


def rmsprop(row: np.ndarray, g: np.ndarray, s: State, t: int) -> np.ndarray:
    s["s"] = F(0.9) * s.get("s", F(0)) + F(1 - 0.9) * (g * g)
    return row - F(0.3) * g / np.sqrt(s["s"] + F(1e-8))


def adam(row: np.ndarray, g: np.ndarray, s: State, t: int) -> np.ndarray:
    s["m"] = F(0.9) * s.get("m", F(0)) + F(1 - 0.9) * g
    s["v"] = F(0.999) * s.get("v", F(0)) + F(1 - 0.999) * (g * g)
    first, second = s["m"] / F(1 - power(0.9, t)), s["v"] / F(1 - power(0.999, t))
    return row - F(0.3) * first / (np.sqrt(second) + F(1e-8))


def downpour_adam(row: np.ndarray, g: np.ndarray, s: State, t: int) -> np.ndarray:
    s["d"] = d = np.asarray(F(0.9) * s.get("d", F(0)) + F(1))
    s["s"] = F(0.9) * s.get("s", F(0)) + g * g
    s["v"] = F(0.8) * s.get("v", F(0)) + (F(1) - F(0.8)) * g
    least = d * F(1e-6)
    return row - F(0.3) * np.sqrt((d + least) / (s["s"] + least)) * s["v"]


def downpour_adagrad(row: np.ndarray, g: np.ndarray, s: State, t: int) -> np.ndarray:
    before, squares = s.get("s", np.asarray(F(0))), F(0)
    for one in g:
        squares += one * one
    s["s"] = np.asarray(before + squares / F(len(g)))
    return np.clip(row - F(0.3) * np.sqrt(F(3) / (F(3) + before)) * g, F(-0.9), F(0.8))


def summary(row: np.ndarray, g: np.ndarray, s: State, t: int) -> np.ndarray:
    return F(0.9) * row + g


def power(base: float, exponent: int) -> float:
    """Returns a power by squaring, as the store does: `**` differs between libraries."""
    result = 1.0
    while exponent:
        result *= base if exponent & 1 else 1.0
        base *= base
        exponent >>= 1
    return result


CASES: dict[str, tuple[Part, Formula, Callable[[], optax.GradientTransformation] | None]] = {
    "sgd": (Sgd(0.3), sgd, lambda: optax.sgd(0.3)),
    "momentum": (Momentum(0.3, 0.8), momentum, lambda: optax.sgd(0.3, 0.8)),
    "nesterov": (Momentum(0.3, 0.8, nesterov=True), nesterov,
                 lambda: optax.sgd(0.3, 0.8, nesterov=True)),
    "adagrad": (Adagrad(0.3), adagrad, lambda: optax.adagrad(0.3)),
    "adagrad of fluid": (Adagrad(0.3, 0.0, 1e-6, epsilon_outside=True), adagrad_of_fluid, None),
    "rmsprop": (Rmsprop(0.3), rmsprop, lambda: optax.rmsprop(0.3)),
    "downpour_adagrad": (DownpourAdagrad(0.3, 3.0, -0.9, 0.8), downpour_adagrad, None),
    "downpour_adam": (DownpourAdam(0.3, 0.9, 0.8, 1e-6), downpour_adam, None),
    "summary": (Summary(0.9), summary, None),
    "adam": (Adam(0.3), adam, lambda: optax.adam(0.3)),
}  # fmt: skip
LAZY = {"momentum", "nesterov", "rmsprop", "adam"}


def store_of(optimizer: Part) -> TableStore:
    return TableStore(TableSpec(name="t", dim=DIM, initializer=Uniform(-1, 1), optimizer=optimizer))


@pytest.mark.parametrize("name", CASES)
def test_it_is_its_formula_to_the_bit(name: str) -> None:
    optimizer, formula, _ = CASES[name]
    store = store_of(optimizer)
    rows = dict(enumerate(store.look_up(np.arange(KEYS))))
    states: dict[int, State] = {key: {} for key in rows}
    own_steps = dict.fromkeys(rows, 0)
    for step in range(STEPS):
        keys = RANDOM.permutation(KEYS)[: RANDOM.integers(1, KEYS)]
        grads = RANDOM.normal(size=(len(keys), DIM)).astype(F)
        grads[RANDOM.random(grads.shape) < 0.1] = 0
        store.update(keys, grads, step=step)
        for key, grad in zip(keys.tolist(), grads, strict=True):
            own_steps[key] += 1
            rows[key] = formula(rows[key], grad, states[key], own_steps[key])
        np.testing.assert_array_equal(store.look_up(np.arange(KEYS)), np.stack(list(rows.values())))


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][2] is not None])
def test_it_is_optax_on_the_dense_table(name: str) -> None:
    """Lazy ones if every step touches every row; the others for any touched rows.

    XLA may contract a product and a sum into one operation, which rounds once instead of twice, and
    multiplies by an inverse root instead of dividing by a root: so within some roundings of a
    row's size, which is about 1. In addition, optax's Adam has 1 - beta**t in float32, which at
    t = 1 leaves 4 digits of 0.001, half of them in the root: 0.3 times 3e-5 of each step.
    """
    optimizer, _, make = CASES[name]
    assert make is not None
    store, dense = store_of(optimizer), make()
    params = store.look_up(np.arange(KEYS))
    state = dense.init(params)
    for step in range(STEPS):
        few = KEYS if name in LAZY else KEYS // 3
        keys = RANDOM.permutation(KEYS)[:few]
        grads = np.zeros((KEYS, DIM), F)
        grads[keys] = RANDOM.normal(size=(few, DIM))
        store.update(keys, grads[keys], step=step)
        updates, state = dense.update(grads, state, params)
        params = np.asarray(optax.apply_updates(params, updates))
        close = 3e-5 if name == "adam" else 2e-6
        np.testing.assert_allclose(store.look_up(np.arange(KEYS)), params, rtol=2e-6, atol=close)


@pytest.mark.parametrize("name", sorted(LAZY))
def test_rows_that_are_not_touched_stay_as_they_are(name: str) -> None:
    store = store_of(CASES[name][0])
    ones = np.ones((KEYS, DIM), F)
    store.update(np.arange(KEYS), ones)
    before = store.look_up(np.arange(KEYS))
    store.update(np.arange(3), ones[:3])
    np.testing.assert_array_equal(store.look_up(np.arange(3, KEYS)), before[3:])


def test_a_push_may_bring_its_learning_rate() -> None:
    store = TableStore(TableSpec(name="t", dim=2, initializer=Constant(1.0), optimizer=Sgd(0.5)))
    keys, grads = np.array([3]), np.ones((1, 2), F)
    store.update(keys, grads, learning_rate=0.25)
    assert store.look_up(keys).tolist() == [[0.75, 0.75]]
    store.update(keys, grads)
    assert store.look_up(keys).tolist() == [[0.25, 0.25]]


def test_deltas_are_added_whatever_the_optimizer() -> None:
    store = store_of(Adam())
    before = store.look_up(np.arange(4))
    store.add(np.arange(4), np.full((4, DIM), 0.5, F))
    np.testing.assert_array_equal(store.look_up(np.arange(4)), before + F(0.5))

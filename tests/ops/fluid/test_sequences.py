"""Sequence operators match numpy on each sequence, and rows outside of sequences have no effect."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.fluid.computed import Case, all_computed, by_slot

RANDOM = np.random.default_rng(0)
LENGTHS = np.asarray([2, 0, 4, 1], np.int32)
ROWS = RANDOM.normal(size=(7, 3)).astype(np.float32)
MORE = np.concatenate([ROWS, np.repeat(ROWS[-1:], 5, axis=0)])
SEQUENCES = np.split(ROWS, np.cumsum(LENGTHS)[:-1])
FILTERS = RANDOM.normal(size=(9, 2)).astype(np.float32)


def around(rows: np.ndarray) -> np.ndarray:
    """Returns the context of each row of one sequence: one before, itself, one after."""
    edge = np.zeros((1, 3), np.float32)
    wide = np.concatenate([edge, rows, edge])
    return np.concatenate([wide[at : at + len(rows)] for at in range(3)], axis=1)


@pytest.mark.parametrize("rows", [ROWS, MORE], ids=["rows", "more rows"])
def test_each_sequence_is_by_itself(rows: np.ndarray) -> None:
    given = {"X": rows, "XLengths": LENGTHS}
    pools: dict[str, Any] = {
        "SUM": lambda x: x.sum(0),
        "AVERAGE": lambda x: x.mean(0),
        "SQRT": lambda x: x.sum(0) / np.sqrt(len(x)),
        "MAX": lambda x: x.max(0),
        "FIRST": lambda x: x[0],
        "LAST": lambda x: x[-1],
    }
    empty = np.full(3, 0.5)
    wanted = {k: np.stack([take(x) if len(x) else empty for x in SEQUENCES])
              for k, take in pools.items()}  # fmt: skip
    cases: list[Case] = [
        ("sequence_pool", {"pooltype": kind, "pad_value": 0.5}, given) for kind in wanted
    ]
    cases += [
        ("sequence_softmax", {}, {**given, "X": rows[:, :1]}),
        ("sequence_conv", {}, {**given, "Filter": FILTERS}),
        ("sequence_expand", {}, {"X": ROWS[:4], "Y": rows, "YLengths": LENGTHS}),
    ]
    *pooled, shares, convolved, expanded = all_computed(cases)
    for kind, made in zip(wanted, pooled, strict=True):
        np.testing.assert_allclose(made["Out"], wanted[kind], rtol=1e-5, atol=1e-6, err_msg=kind)
    grown = [np.exp(x[:, :1]) for x in SEQUENCES]
    parts = np.concatenate([x / x.sum() if len(x) else x for x in grown])
    np.testing.assert_allclose(shares["Out"][:7], parts, rtol=1e-5)
    each = np.concatenate([around(x) @ FILTERS for x in SEQUENCES])
    np.testing.assert_allclose(convolved["Out"][:7], each, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(expanded["Out"][:7], np.repeat(ROWS[:4], LENGTHS, axis=0))


@pytest.mark.parametrize("kind", ["SUM", "AVERAGE", "SQRT", "MAX", "FIRST", "LAST"])
def test_rows_of_no_sequence_have_no_gradient(kind: str) -> None:
    weights = RANDOM.normal(size=(4, 3)).astype(np.float32)

    def loss(rows: jax.Array) -> jax.Array:
        made = by_slot("sequence_pool", {"pooltype": kind}, {"X": rows, "XLengths": LENGTHS})
        return jnp.sum(made["Out"] * weights)

    few, many = jax.jit(lambda a, b: (jax.grad(loss)(a), jax.grad(loss)(b)))(ROWS, MORE)
    np.testing.assert_allclose(many[:7], few, rtol=1e-6)
    np.testing.assert_array_equal(many[7:], 0)
    assert np.abs(few).sum() > 0

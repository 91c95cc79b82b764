"""Initial rows: determined by key and seed alone, the same everywhere."""

import hashlib
from statistics import NormalDist

import numpy as np
import pytest

from jaxfleet.errors import ProgramError
from jaxfleet.tables import Constant, Normal, Sgd, TableSpec, TableStore, Uniform
from jaxfleet.tables.buckets import mix
from jaxfleet.tables.initializers import initial_rows
from jaxfleet.tables.validation import Part

RANDOM = np.random.default_rng(0)
KEYS = np.array([0, 1, -1, 7, 2**40 + 7, np.iinfo(np.int64).min, np.iinfo(np.int64).max])
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def bits(keys: np.ndarray, seed: int, dim: int) -> np.ndarray:
    """Returns uint64[n, dim], 32 random bits each: the module's formula, in numpy."""
    seeded = (keys.view(np.uint64) ^ mix(np.array([seed]))).view(np.int64)
    pairs = (np.arange(dim) // 2).astype(np.uint64) * GOLDEN
    mixed = mix((mix(seeded)[:, None] + pairs).view(np.int64))
    return np.where(np.arange(dim) % 2, mixed >> np.uint64(32), mixed & np.uint64(0xFFFFFFFF))


@pytest.mark.parametrize("dim", [1, 2, 5, 16])
def test_a_uniform_row_is_its_formula(dim: int) -> None:
    expected = (-0.3 + 0.8 * (bits(KEYS, 9, dim) * 2.0**-32)).astype(np.float32)
    np.testing.assert_array_equal(initial_rows(Uniform(-0.3, 0.5, seed=9), KEYS, dim), expected)


def test_a_normal_row_is_its_formula() -> None:
    """The quantile has seven digits: a few float32 roundings from Python's sixteen."""
    keys = RANDOM.integers(-(2**62), 2**62, 500)
    quantile = np.vectorize(NormalDist(1.0, 2.0).inv_cdf)
    expected = quantile((bits(keys, 3, 6) + 0.5) * 2.0**-32)
    found = initial_rows(Normal(1.0, 2.0, seed=3), keys, 6)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_rows_are_spread_as_they_should_be() -> None:
    keys = np.arange(20_000)
    uniform = initial_rows(Uniform(-0.1, 0.1), keys, 8)
    assert uniform.min() >= np.float32(-0.1)
    assert uniform.max() < np.float32(0.1)
    # 160,000 draws: the mean's deviation is 0.1 / sqrt(3 * 160,000); 5 times that never occurs.
    assert abs(uniform.mean()) < 5 * 0.1 / (3 * uniform.size) ** 0.5
    normal = initial_rows(Normal(0.0, 1.0), keys, 8)
    assert abs(normal.mean()) < 5 / normal.size**0.5
    assert abs(normal.std() - 1) < 5 / (2 * normal.size) ** 0.5
    assert abs(np.corrcoef(normal, rowvar=False) - np.eye(8)).max() < 5 / len(keys) ** 0.5


@pytest.mark.parametrize("initializer", [Uniform(seed=1), Normal(seed=1), Constant(0.5)])
def test_order_and_company_make_no_difference(initializer: Part) -> None:
    keys = RANDOM.permutation(1000)
    alone = [initial_rows(initializer, keys[i : i + 1], 3) for i in range(0, 1000, 50)]
    together = initial_rows(initializer, keys, 3)
    np.testing.assert_array_equal(np.concatenate(alone), together[::50])


def test_the_bits_are_these_on_every_machine() -> None:
    """Fixed forever: otherwise rows of tables saved elsewhere would change."""
    rows = [initial_rows(part, KEYS, 16) for part in (Uniform(-1, 1, 5), Normal(0, 1, 5))]
    digest = hashlib.sha256(np.concatenate(rows).astype("<f4").tobytes()).hexdigest()
    assert digest[:16] == "6b6b1e40a90f2574"


def test_another_seed_gives_other_rows() -> None:
    first, second = (initial_rows(Uniform(seed=seed), KEYS, 4) for seed in (0, 1))
    assert (first != second).all()


def test_what_is_no_initializer_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"Sgd\(.*\) is no initializer"):
        TableStore(TableSpec(name="t", dim=1, initializer=Sgd()))

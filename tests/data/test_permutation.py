"""The keyed shuffle is a permutation, and as random as a shuffle needs to be."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfleet.data.permutation import Permutation


@given(st.integers(1, 3000), st.integers(0, 2**70), st.integers(0, 2**40))
def test_every_index_comes_once(length: int, seed: int, epoch: int) -> None:
    order = Permutation(length, seed, epoch)(np.arange(length))
    assert np.array_equal(np.sort(order), np.arange(length))


@given(st.integers(1, 3000), st.integers(0, 9), st.data())
def test_an_index_does_not_depend_on_what_is_asked_with_it(
    length: int, seed: int, data: st.DataObject
) -> None:
    order = Permutation(length, seed, 0)
    position = data.draw(st.integers(0, length - 1))
    assert order(np.array([position]))[0] == order(np.arange(length))[position]


@pytest.mark.parametrize("length", [3, 4, 5])
def test_all_orders_of_few_samples_are_equally_frequent(length: int) -> None:
    kinds, each = math.factorial(length), 6
    draws = [(seed, epoch) for seed in range(each) for epoch in range(kinds)]
    found = Counter(tuple(Permutation(length, *draw)(np.arange(length))) for draw in draws)
    assert len(found) == kinds
    chi_squared = sum((count - each) ** 2 / each for count in found.values())
    assert chi_squared < kinds - 1 + 4 * math.sqrt(2 * (kinds - 1))  # four standard deviations


def test_neighbours_of_a_long_source_are_far_apart() -> None:
    length = 2**40 + 1
    order = Permutation(length, 0, 0)(np.arange(4000))
    assert len(set(order.tolist())) == 4000
    assert order.min() >= 0
    assert order.max() < length
    # The mean of 4,000 uniform numbers deviates by 1/sqrt(12 * 4000) of the range.
    assert abs(order.mean() / length - 0.5) < 5 / math.sqrt(12 * 4000)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / math.sqrt(4000)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    positions = np.arange(50)
    orders = [Permutation(50, seed, epoch)(positions) for seed in range(5) for epoch in range(5)]
    assert len({tuple(order) for order in orders}) == 25


def test_an_empty_range_has_no_permutation() -> None:
    with pytest.raises(ValueError, match="a permutation of 0 indices"):
        Permutation(0, 0, 0)

"""Matching of two sequences."""

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from jaxfleet.ir.patience_diff import match
from tests.drawing import at_most
from tests.ir.timing import seconds

FEW_LETTERS = st.text(alphabet="abcd", max_size=30)


@at_most(500)
@given(FEW_LETTERS, FEW_LETTERS)
def test_matches_are_equal_and_ascend_on_both_sides(a: str, b: str) -> None:
    pairs = match(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < next_i and j < next_j for (i, j), (next_i, next_j) in pairwise(pairs))


@given(FEW_LETTERS)
def test_equal_sequences_match_throughout(a: str) -> None:
    assert match(a, a) == [(i, i) for i in range(len(a))]


@given(st.lists(st.integers(), unique=True, max_size=40), st.randoms())
def test_what_is_left_when_elements_go_matches_throughout(
    elements: list[int], chance: random.Random
) -> None:
    left = [element for element in elements if chance.random() < 0.7]
    assert [elements[i] for i, _ in match(elements, left)] == left


def test_repeated_elements_are_told_apart_by_what_stands_around_them() -> None:
    chance = random.Random(0)
    before = [chance.randrange(20) for _ in range(2000)]
    after = [element for element in before if chance.random() < 0.9]
    assert len(match(before, after)) > 0.99 * len(after)


def test_ten_thousand_elements_in_another_order_take_a_moment() -> None:
    before = list(range(10_000))
    after = before[:]
    random.Random(0).shuffle(after)
    # 0.05 on the development machine
    assert seconds(lambda: match(before, after)) < 1.0

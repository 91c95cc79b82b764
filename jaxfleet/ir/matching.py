"""Matches what two sequences share, in about linear time: patience diff.

What stands once on both sides is matched first, as far as it stands in the same order on both;
between two matches the same is done again. Python's `difflib` tries every place of every line,
which on programs of thousands of operators takes seconds.

Patience diff is Bram Cohen's. Here, where no element stands once, runs of several elements that do
are matched, and short stretches are compared in full.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import TypeAlias

Pairs: TypeAlias = list[tuple[int, int]]

_COMPARED_IN_FULL = 4096  # the most pairs of elements, 64 by 64: under 2 ms

_WIDTHS = (1, 4, 16)  # how long the runs are that are looked for, the shortest first


def match(before: Sequence[Hashable], after: Sequence[Hashable]) -> Pairs:
    """Returns the places of equal elements, as pairs that ascend on both sides."""
    numbers: dict[Hashable, int] = {}  # ints compare faster than operators
    a = [numbers.setdefault(element, len(numbers)) for element in before]
    b = [numbers.setdefault(element, len(numbers)) for element in after]
    pairs: Pairs = []
    stretches = [(0, len(a), 0, len(b))]
    while stretches:
        a_from, a_to, b_from, b_to = stretches.pop()
        while a_from < a_to and b_from < b_to and a[a_from] == b[b_from]:
            pairs.append((a_from, b_from))
            a_from, b_from = a_from + 1, b_from + 1
        while a_from < a_to and b_from < b_to and a[a_to - 1] == b[b_to - 1]:
            a_to, b_to = a_to - 1, b_to - 1
            pairs.append((a_to, b_to))
        found = _anchors(a[a_from:a_to], b[b_from:b_to])
        pairs += [(a_from + i, b_from + j) for i, j in found]
        corners = [(-1, -1), *found, (a_to - a_from, b_to - b_from)]
        for (i, j), (next_i, next_j) in pairwise(corners):
            if found and next_i - i > 1 and next_j - j > 1:
                stretches.append((a_from + i + 1, a_from + next_i, b_from + j + 1, b_from + next_j))
    return sorted(pairs)


def _anchors(a: Sequence[int], b: Sequence[int]) -> Pairs:
    """Returns matches to divide two stretches at; none where they cannot be told apart."""
    if not a or not b:
        return []
    for width in _WIDTHS:
        once_a, once_b = _standing_once(a, width), _standing_once(b, width)
        places = [(place, once_b[run]) for run, place in once_a.items() if run in once_b]
        if places:
            return _in_order(places)
    return _longest_common(a, b) if len(a) * len(b) <= _COMPARED_IN_FULL else []


def _standing_once(elements: Sequence[int], width: int) -> dict[tuple[int, ...], int]:
    """Returns the places of those runs of so many elements that stand in the sequence once."""
    runs = list(zip(*(elements[start:] for start in range(width)), strict=False))
    count = Counter(runs)
    return {run: place for place, run in enumerate(runs) if count[run] == 1}


def _in_order(places: Pairs) -> Pairs:
    """Returns the longest run of pairs that ascends on both sides, by patience sorting.

    Args:
        places: pairs that ascend on the first side.
    """
    tops: list[int] = []  # the least second place that ends an ascending run of each length
    ends: Pairs = []  # the pair that it is in
    before: dict[tuple[int, int], tuple[int, int] | None] = {}  # the pair before it in its run
    for pair in places:
        pile = bisect_left(tops, pair[1])
        before[pair] = ends[pile - 1] if pile else None
        tops[pile : pile + 1] = [pair[1]]
        ends[pile : pile + 1] = [pair]
    run: Pairs = []
    at = ends[-1] if ends else None
    while at is not None:
        run.append(at)
        at = before[at]
    return run[::-1]


def _longest_common(a: Sequence[int], b: Sequence[int]) -> Pairs:
    """Returns a longest common subsequence, by comparing all with all."""
    length = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            same = a[i] == b[j]
            length[i][j] = (
                length[i + 1][j + 1] + 1 if same else max(length[i + 1][j], length[i][j + 1])
            )
    pairs: Pairs = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif length[i + 1][j] >= length[i][j + 1]:
            i += 1
        else:
            j += 1
    return pairs

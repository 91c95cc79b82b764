"""Chooses few cases of a grid so that every two values of two options occur together in one."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product

Choice = tuple[object, ...]


def pairwise(options: Mapping[str, Sequence[object]]) -> list[Choice]:
    """Returns cases, the same in every run: each adds the most pairs that no earlier case covers.

    Args:
        options: the values of each option; a case has one of each, in this order.
    """
    columns = list(combinations(range(len(options)), 2))
    grid = [(case, _pairs(case, columns)) for case in product(*options.values())]
    left = set[object]().union(*(pairs for _, pairs in grid))
    chosen: list[Choice] = []
    while left:
        case, pairs = max(grid, key=lambda found: len(found[1] & left))  # the first of the best
        chosen.append(case)
        left -= pairs
    return chosen


def _pairs(case: Choice, columns: Sequence[tuple[int, int]]) -> frozenset[object]:
    return frozenset((one, case[one], other, case[other]) for one, other in columns)

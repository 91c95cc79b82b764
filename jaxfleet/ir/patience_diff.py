"""Patience diff of two sequences in about linear time, and unified diffs of programs.

Elements that occur once on both sides are matched first, as far as their order agrees; the
stretches between two matches are handled recursively. Python's `difflib` tries every position of
every line, which takes seconds on programs of thousands of operators.

Patience diff is Bram Cohen's. Here, if no element occurs once, runs of several elements that do are
matched, and short stretches are compared in full.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from jaxfleet.ir.printer import print_program
from jaxfleet.ir.program import Program

Pairs: TypeAlias = list[tuple[int, int]]

_COMPARED_IN_FULL = 4096  # the most pairs of elements, 64 by 64: under 2 ms

_WIDTHS = (1, 4, 16)  # run lengths to try, in order


def match(before: Sequence[Hashable], after: Sequence[Hashable]) -> Pairs:
    """Returns the positions of equal elements, as pairs that ascend on both sides."""
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
    """Returns matches at which to divide two stretches; none if no element or run is unique."""
    if not a or not b:
        return []
    for width in _WIDTHS:
        once_a, once_b = _standing_once(a, width), _standing_once(b, width)
        places = [(place, once_b[run]) for run, place in once_a.items() if run in once_b]
        if places:
            return _in_order(places)
    return _longest_common(a, b) if len(a) * len(b) <= _COMPARED_IN_FULL else []


def _standing_once(elements: Sequence[int], width: int) -> dict[tuple[int, ...], int]:
    """Returns the positions of the runs of `width` elements that occur once in the sequence."""
    runs = list(zip(*(elements[start:] for start in range(width)), strict=False))
    count = Counter(runs)
    return {run: place for place, run in enumerate(runs) if count[run] == 1}


def _in_order(places: Pairs) -> Pairs:
    """Returns the longest run of pairs that ascends on both sides, by patience sorting.

    `places` ascends on the first side.
    """
    tops: list[int] = []  # the least second position that ends an ascending run of each length
    ends: Pairs = []  # the pair of that position
    before: dict[tuple[int, int], tuple[int, int] | None] = {}  # the previous pair in its run
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
    """Returns a longest common subsequence, by comparing all pairs."""
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


def unified_diff(before: Program, after: Program, *, context: int = 3, source: bool = False) -> str:
    """Returns the difference of two programs' texts, empty if they print alike.

    `context` equal lines are shown around a difference. With `source`, the user's source lines are
    added as comments, and compared too.
    """
    texts = [print_program(program, source=source).split("\n") for program in (before, after)]
    hunks = list(_hunks(texts[0], texts[1], context))
    return "\n".join([f"--- {before.name}", f"+++ {after.name}", *hunks]) if hunks else ""


def _hunks(a: Sequence[str], b: Sequence[str], context: int) -> Iterator[str]:
    for near in _grouped(_changes(match(a, b), len(a), len(b)), 2 * context):
        before = min(context, near[0][0].start)
        after = min(context, len(a) - near[-1][0].stop)
        whole_a = range(near[0][0].start - before, near[-1][0].stop + after)
        whole_b = range(near[0][1].start - before, near[-1][1].stop + after)
        yield f"@@ -{_span(whole_a)} +{_span(whole_b)} @@"
        at = whole_a.start
        for gone, new in near:
            yield from (f" {line}" for line in a[at : gone.start])
            yield from (f"-{line}" for line in a[gone.start : gone.stop])
            yield from (f"+{line}" for line in b[new.start : new.stop])
            at = gone.stop
        yield from (f" {line}" for line in a[at : whole_a.stop])


def _changes(pairs: Pairs, len_a: int, len_b: int) -> Iterator[tuple[range, range]]:
    """Yields the stretches between matches: lines of the first removed, of the second added."""
    i = j = 0
    for next_i, next_j in [*pairs, (len_a, len_b)]:
        if next_i > i or next_j > j:
            yield range(i, next_i), range(j, next_j)
        i, j = next_i + 1, next_j + 1


def _grouped(
    changes: Iterator[tuple[range, range]], apart: int
) -> Iterator[list[tuple[range, range]]]:
    """Yields runs of changes at most `apart` lines apart."""
    near: list[tuple[range, range]] = []
    for change in changes:
        if near and change[0].start - near[-1][0].stop > apart:
            yield near
            near = []
        near.append(change)
    if near:
        yield near


def _span(lines: range) -> str:
    """Returns a span in unified diff notation: from 1; an empty span by the line before."""
    start = lines.start + 1 if lines else lines.start
    return str(start) if len(lines) == 1 else f"{start},{len(lines)}"

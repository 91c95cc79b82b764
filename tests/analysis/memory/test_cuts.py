"""Cuts of a step without recomputation: optimal by their cost model."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given

from jaxfleet.analysis.memory import ExecutableCuts, memory_profile
from jaxfleet.ir import Program
from jaxfleet.passes import CutApart
from tests.passes.drawn import programs

MOST = 9  # pieces; all ways to cut are tried


def held(apart: ExecutableCuts, cuts: tuple[int, ...]) -> int:
    bounds = [0, *(apart.places.index(cut) for cut in cuts), len(apart.places)]
    return max(int(apart.held[first, end]) for first, end in pairwise(bounds))


@given(programs())
def test_the_fewest_executables_are_found_for_every_budget(program: Program) -> None:
    apart = ExecutableCuts.of(program, {})
    if not 1 < len(apart.places) <= MOST:
        return
    inner = apart.places[1:]
    ways = {cuts: held(apart, cuts) for n in range(MOST) for cuts in combinations(inner, n)}
    assert apart.least() == min(ways.values())
    for budget in sorted(set(ways.values())):
        cuts = apart.cuts(budget)
        assert cuts is not None
        assert ways[cuts] <= budget
        assert len(cuts) == min(len(way) for way, size in ways.items() if size <= budget)
    assert apart.cuts(apart.least() - 1) is None


@pytest.mark.grid
@given(programs())
def test_no_less_is_counted_than_the_curve_says(program: Program) -> None:
    apart = ExecutableCuts.of(program, {})
    if not apart.places:
        return
    cuts = apart.cuts(apart.least())
    assert cuts is not None
    made = CutApart(cuts=cuts).run(program)
    assert memory_profile(made, {}).peak <= apart.least()

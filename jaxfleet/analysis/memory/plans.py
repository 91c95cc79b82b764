"""Recomputation plans: the cheapest for a budget, uniform ones, and ones that offload to the host.

Keeping some values and rerunning the operators between them is checkpointing (Chen et al., 2016,
"Training deep nets with sublinear memory cost"). Here stages differ in bytes and in cost, and a
dynamic program over chains of such stages selects the kept values, as in Beaumont, Herrmann et al.
(2019, "Optimal checkpointing for heterogeneous chains"); unlike theirs, nothing runs more than
twice, so a plan only records of each value whether it is kept. The tests compare plans with an
exhaustive search, and with an integer program over single operators (Jain et al., 2020,
"Checkmate").

For equal layers the least memory is near the square root of their number (Chen et al., 2016),
whatever one layer takes inside an executable; uniform plans do not depend on the model of a chain.

With offloading, the previous group's saved values leave while a group runs forward, and arrive
while it runs backward. So the device holds a group's own values and what its neighbours save, not
what all groups before it save. Groups are uniform: they begin where little crosses, or anywhere if
there are few such places.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from statistics import median

import numpy as np
from numpy.typing import NDArray

from jaxfleet.analysis.memory.chain import Chain, RecomputePlan, StageGroup, Table

_MOST_POINTS = 256  # of a front; larger ones keep the cheapest of each n-th of the budget


def plan_for(chain: Chain, budget: int) -> RecomputePlan | None:
    """Returns the plan within a budget that reruns the least forward, or None."""
    groups = _groups(chain, budget)
    return None if groups is None else chain.plan(groups)


def smallest_budget(chain: Chain) -> tuple[int, RecomputePlan]:
    """Returns the smallest feasible budget, and the plan for it."""
    low, high = 0, int(chain.levels[-1].held[0, chain.stages])
    while low < high:
        middle = (low + high) // 2
        if _can_meet(chain, middle):
            high = middle
        else:
            low = middle + 1
    plan = plan_for(chain, high)
    assert plan is not None
    return high, plan


def peak_of(chain: Chain, plan: RecomputePlan) -> int:
    """Returns the peak bytes of a plan."""
    return max(held for held, _ in _bytes(chain, chain.groups(plan)))


def cost_of(chain: Chain, plan: RecomputePlan) -> int:
    """Returns the cost of a plan's recomputation, in the unit of `Costs`."""
    return sum(chain.need(group).again_cost for group in chain.groups(plan)[:-1])


def _bytes(chain: Chain, groups: Sequence[StageGroup]) -> list[tuple[int, int]]:
    """Returns the bytes held while each group runs, and the bytes kept after it ran."""
    found, kept = [], 0
    for group in groups:
        # The last group runs backward at once, so it keeps nothing.
        saved = chain.need(group).saved_bytes if group is not groups[-1] else 0
        held = kept + chain.held(group, saved)
        kept += int(chain.crossing[group.first, group.end]) + saved
        found.append((held, kept))
    return found


def _groups(chain: Chain, budget: int) -> list[StageGroup] | None:
    """Returns the groups within a budget that rerun the least forward, or None."""
    fronts = [_Front.start()]
    for end in range(1, chain.stages + 1):
        fronts.append(_front(chain, fronts, end, budget))
    if not len(fronts[-1].kept):
        return None
    groups: list[StageGroup] = []
    end, point = chain.stages, int(np.argmin(fronts[-1].cost))
    while end:
        first, level, before = fronts[end].back[point].tolist()
        groups.append(StageGroup(first, end, chain.levels[level].stored))
        end, point = first, before
    return groups[::-1]


@dataclass(frozen=True)
class _Front:
    """The Pareto front of groupings of the first stages, by bytes kept and cost."""

    kept: NDArray[np.int64]  # the bytes kept, in increasing order
    cost: NDArray[np.int64]  # of the recomputation
    back: Table  # the first stage of the last group, its level, and the point that it extends

    @classmethod
    def start(cls) -> "_Front":
        zero = np.zeros(1, np.int64)
        return cls(zero, zero, np.zeros((1, 3), np.int64))

    def best(self, budget: int) -> "_Front":
        """Returns the points that no other dominates, thinned."""
        order = np.lexsort((self.cost, self.kept))
        cost = self.cost[order]
        least = np.minimum.accumulate(cost)
        order = order[np.r_[True, least[1:] < least[:-1]]] if len(order) else order
        if len(order) > _MOST_POINTS:
            bucket = self.kept[order] * _MOST_POINTS // max(1, budget)
            is_cheapest = np.r_[bucket[1:] != bucket[:-1], True]
            is_cheapest[0] = True  # only the point that keeps least may be extendable
            order = order[is_cheapest]
        return _Front(self.kept[order], self.cost[order], self.back[order])


def _front(chain: Chain, fronts: list[_Front], end: int, budget: int) -> _Front:
    """Returns the front of the first stages, up to `end`."""
    kept = np.concatenate([front.kept for front in fronts])
    cost = np.concatenate([front.cost for front in fronts])
    points = [len(front.kept) for front in fronts]
    first = np.repeat(np.arange(end), points)
    point = np.concatenate([np.arange(count) for count in points])
    parts = []
    for level in _levels(chain, end):
        at = chain.levels[level]
        fits = kept + at.held[first, end] <= budget
        began = first[fits]
        parts.append(
            (
                kept[fits] + (chain.crossing + at.saved)[began, end],
                cost[fits] + at.again[began, end],
                np.stack([began, np.full_like(began, level), point[fits]], axis=1),
            )
        )
    found = _Front(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    return found.best(budget)


def _levels(chain: Chain, end: int) -> range:
    """Returns the levels that a group may have: the last group keeps all, at no cost."""
    last = len(chain.levels) - 1
    return range(last, last + 1) if end == chain.stages else range(last + 1)


def _can_meet(chain: Chain, budget: int) -> bool:
    """Whether any grouping meets a budget; tries the one that keeps least up to each stage."""
    least = np.full(chain.stages + 1, np.iinfo(np.int64).max // 2)
    least[0] = 0
    for end in range(1, chain.stages + 1):
        for level in _levels(chain, end):
            at = chain.levels[level]
            fits = least[:end] + at.held[:end, end] <= budget
            after = least[:end] + chain.crossing[:end, end] + at.saved[:end, end]
            least[end] = min(least[end], np.min(after[fits], initial=least[end]))
    return bool(least[-1] < np.iinfo(np.int64).max // 2)


_NARROW = 1.5  # cut candidates, relative to the fewest bytes crossing between two stages
_RATIOS = (1.0, 0.66, 1.5)  # of the square root


def uniform_plans(chain: Chain) -> Iterator[RecomputePlan]:
    """Yields plans that recompute every group but the last, the most promising first."""
    narrow = narrow_stages(chain)
    if not narrow:
        return
    seen = set[int]()
    for ratio in _RATIOS:
        groups = min(len(narrow) + 1, max(2, round(ratio * math.sqrt(len(narrow) + 1))))
        if groups not in seen:
            seen.add(groups)
            stages = uniform_groups(chain.stages, narrow, groups)[1:-1]
            cuts = tuple(chain.places[stage] for stage in stages)
            yield RecomputePlan(cuts=cuts, kept=(False,) * len(cuts) + (True,))


def uniform_groups(stages: int, places: Sequence[int], count: int) -> list[int]:
    """Returns the first stages of `count` groups of equal length, or fewer, and the end of all."""
    count = min(count, len(places) + 1)
    return [0, *(places[len(places) * n // count] for n in range(1, count)), stages]


def narrow_stages(chain: Chain) -> list[int]:
    """Returns the stages before which a step is best cut."""
    valleys = list(_valleys(chain.crossing[0, 1 : chain.stages].tolist()))
    if not valleys:
        return []
    usual = median(size for _, size in valleys)
    return [stage + 1 for stage, size in valleys if size <= _NARROW * usual]


def _valleys(crossing: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields local minima of the crossing bytes, with the bytes."""
    runs = [(next(run)[0], size) for size, run in groupby(enumerate(crossing), itemgetter(1))]
    for number, (place, size) in enumerate(runs):
        beside = [runs[n][1] for n in (number - 1, number + 1) if 0 <= n < len(runs)]
        if all(size < other for other in beside):
            yield place, size


_MOST_GROUPS = 64
_BESIDE = 2  # groups with saved values on the device beside a group's own: leaving, or arriving


@dataclass(frozen=True)
class OffloadPlan:
    """A plan for a step whose saved values wait on the host."""

    plan: RecomputePlan  # the groups, and their saved values
    held: int  # the modelled peak bytes on the device
    cost: int  # of the recomputation


def offload_plans(chain: Chain) -> list[OffloadPlan]:
    """Returns plans for saved values that wait on the host, the cheapest recomputation first."""
    found = {made.plan: made for made in _plans(chain)}
    return sorted(found.values(), key=lambda made: (made.cost, made.held))


def _plans(chain: Chain) -> Iterator[OffloadPlan]:
    narrow = narrow_stages(chain)
    # A stage of a long step is more than one operator, so narrow places may be rare.
    places = narrow if len(narrow) ** 2 >= chain.stages else range(1, chain.stages)
    most, count = min(_MOST_GROUPS, len(places) + 1), 1
    while count < most:
        count = min(most, count + max(1, count // 2))
        bounds = uniform_groups(chain.stages, places, count)
        for level in range(len(chain.levels)):
            yield _with(chain, bounds, level)


def _with(chain: Chain, bounds: Sequence[int], number: int) -> OffloadPlan:
    level, spans = chain.levels[number], list(pairwise(bounds))
    groups = [StageGroup(first, end, level.stored) for first, end in spans]
    saved = [int(chain.crossing[at] + level.saved[at]) for at in spans[:-1]]
    held = []
    for place, at in enumerate(spans):
        near = saved[max(0, place - _BESIDE) : place + 1]
        own = chain.levels[-1] if at == spans[-1] else level
        held.append(int(own.held[at]) + sum(near))
    cost = sum(int(level.again[at]) for at in spans[:-1])
    groups[-1] = StageGroup(*spans[-1], chain.levels[-1].stored)
    return OffloadPlan(chain.plan(groups), max(held), cost)

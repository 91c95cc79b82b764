"""Chooses the groups of a chain: what fits a budget, with the least forward run again.

Keeping some values and running what lies between again is checkpointing as Chen et al. have it
(2016, "Training deep nets with sublinear memory cost"). Here stages differ in bytes and in cost,
and a dynamic program over chains of such stages finds what to keep, as Beaumont, Herrmann et al.
do (2019, "Optimal checkpointing for heterogeneous chains"); unlike theirs, nothing runs more than
twice, so a plan says of each value only whether it is kept. The tests hold plans against all that
there are, and against an integer program over single operators (Jain et al., 2020, "Checkmate").
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxfleet.analysis.memory.chain import Chain, Group, Plan, Table

_MOST_POINTS = 256  # of a front: more are thinned to the cheapest of each so many-th of the budget


def plan_for(chain: Chain, budget: int) -> Plan | None:
    """Returns the plan that meets a budget with the least forward run again, or None.

    Args:
        chain: the step.
        budget: the most bytes that it may hold.
    """
    groups = _groups(chain, budget)
    return None if groups is None else chain.plan(groups)


def smallest(chain: Chain) -> tuple[int, Plan]:
    """Returns the least budget that can be met, and the plan for it."""
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


def peak_of(chain: Chain, plan: Plan) -> int:
    """Returns the most bytes that a plan of a chain holds."""
    return max(held for held, _ in _bytes(chain, chain.groups(plan)))


def cost_of(chain: Chain, plan: Plan) -> int:
    """Returns the cost of what a plan of a chain runs again, as `Costs` counts."""
    return sum(chain.need(group).again_cost for group in chain.groups(plan)[:-1])


def _bytes(chain: Chain, groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Returns what is held while each group runs, and what is kept once it ran."""
    found, kept = [], 0
    for group in groups:
        # The last group runs backward at once, and so has nothing to keep.
        saved = chain.need(group).saved_bytes if group is not groups[-1] else 0
        held = kept + chain.held(group, saved)
        kept += int(chain.crossing[group.first, group.end]) + saved
        found.append((held, kept))
    return found


def _groups(chain: Chain, budget: int) -> list[Group] | None:
    """Returns the groups that meet a budget with the least forward run again, or None."""
    fronts = [_Front.start()]
    for end in range(1, chain.stages + 1):
        fronts.append(_front(chain, fronts, end, budget))
    if not len(fronts[-1].kept):
        return None
    groups: list[Group] = []
    end, point = chain.stages, int(np.argmin(fronts[-1].cost))
    while end:
        first, level, before = fronts[end].back[point].tolist()
        groups.append(Group(first, end, chain.levels[level].stored))
        end, point = first, before
    return groups[::-1]


@dataclass(frozen=True)
class _Front:
    """The ways to group the first stages, none of which keeps as little and costs as little.

    Attributes:
        kept: the bytes kept, in increasing order.
        cost: of what runs again.
        back: the first stage of the last group, its level, and the point that it goes on from.
    """

    kept: NDArray[np.int64]
    cost: NDArray[np.int64]
    back: Table

    @classmethod
    def start(cls) -> "_Front":
        """Returns the front of no stages."""
        zero = np.zeros(1, np.int64)
        return cls(zero, zero, np.zeros((1, 3), np.int64))

    def best(self, budget: int) -> "_Front":
        """Returns the points that no other is better than, thinned."""
        order = np.lexsort((self.cost, self.kept))
        cost = self.cost[order]
        least = np.minimum.accumulate(cost)
        order = order[np.r_[True, least[1:] < least[:-1]]] if len(order) else order
        if len(order) > _MOST_POINTS:
            bucket = self.kept[order] * _MOST_POINTS // max(1, budget)
            is_cheapest = np.r_[bucket[1:] != bucket[:-1], True]
            is_cheapest[0] = True  # what keeps least may be all that can go on
            order = order[is_cheapest]
        return _Front(self.kept[order], self.cost[order], self.back[order])


def _front(chain: Chain, fronts: list[_Front], end: int, budget: int) -> _Front:
    """Returns the front of the first stages, up to an end."""
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
    """Returns the levels that a group may have: the last group keeps all, which costs nothing."""
    last = len(chain.levels) - 1
    return range(last, last + 1) if end == chain.stages else range(last + 1)


def _can_meet(chain: Chain, budget: int) -> bool:
    """Tells whether any grouping meets a budget: the one that keeps least up to each stage."""
    least = np.full(chain.stages + 1, np.iinfo(np.int64).max // 2)
    least[0] = 0
    for end in range(1, chain.stages + 1):
        for level in _levels(chain, end):
            at = chain.levels[level]
            fits = least[:end] + at.held[:end, end] <= budget
            after = least[:end] + chain.crossing[:end, end] + at.saved[:end, end]
            least[end] = min(least[end], np.min(after[fits], initial=least[end]))
    return bool(least[-1] < np.iinfo(np.int64).max // 2)

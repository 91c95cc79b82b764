"""Plans with groups of equal length, about as many as each has stages.

For equal layers the least memory is near the square root of their number (Chen et al., 2016),
whatever one layer takes inside an executable; the model of a chain need not know that for it.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import median

from jaxfleet.analysis.memory.chain import Chain, Plan

_NARROW = 1.5  # times the fewest bytes that cross between two stages: where a step is cut
_RATIOS = (1.0, 0.66, 1.5)  # of the square root


def even_plans(chain: Chain) -> Iterator[Plan]:
    """Yields plans that compute every group again but the last, the most promising first."""
    narrow = narrow_stages(chain)
    if not narrow:
        return
    seen = set[int]()
    for ratio in _RATIOS:
        groups = min(len(narrow) + 1, max(2, round(ratio * math.sqrt(len(narrow) + 1))))
        if groups not in seen:
            seen.add(groups)
            stages = groups_of_even_length(chain.stages, narrow, groups)[1:-1]
            cuts = tuple(chain.places[stage] for stage in stages)
            yield Plan(cuts=cuts, kept=(False,) * len(cuts) + (True,))


def groups_of_even_length(stages: int, places: Sequence[int], count: int) -> list[int]:
    """Returns the first stages of so many groups of equal length, or fewer, and the end of all.

    Args:
        stages: how many there are.
        places: the stages that may begin a group, besides the first.
        count: of the groups.
    """
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
    """Yields where fewer bytes cross than before and behind, with the bytes."""
    runs = [(next(run)[0], size) for size, run in groupby(enumerate(crossing), itemgetter(1))]
    for number, (place, size) in enumerate(runs):
        beside = [runs[n][1] for n in (number - 1, number + 1) if 0 <= n < len(runs)]
        if all(size < other for other in beside):
            yield place, size

"""Plans whose saved values wait on the host: of a few groups at a time, they are on the device.

While a group runs forward, what the one before made leaves; while it runs backward, what the one
before it will read arrives. So a group holds what it holds, and what its neighbours save, and not
what all groups before it save. Groups are of equal length, as in `even.py`: they begin where little
crosses, or anywhere where there are few such places.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxfleet.analysis.memory.chain import Chain, Group, Plan
from jaxfleet.analysis.memory.even import groups_of_even_length, narrow_stages

_MOST_GROUPS = 64
_BESIDE = 2  # groups whose saved values are on the device with a group's own: leaving, or arriving


@dataclass(frozen=True)
class Offloaded:
    """A plan for a step whose saved values wait on the host.

    Attributes:
        plan: the groups, and what they save.
        held: the most bytes on the device, as the model counts.
        cost: of what runs again.
    """

    plan: Plan
    held: int
    cost: int


def offloaded_plans(chain: Chain) -> list[Offloaded]:
    """Returns plans for saved values that wait on the host: those that run least again first."""
    found = {made.plan: made for made in _plans(chain)}
    return sorted(found.values(), key=lambda made: (made.cost, made.held))


def _plans(chain: Chain) -> Iterator[Offloaded]:
    narrow = narrow_stages(chain)
    # Of a long step a stage is more than one operator, and there may be hardly a narrow place.
    places = narrow if len(narrow) ** 2 >= chain.stages else range(1, chain.stages)
    most, count = min(_MOST_GROUPS, len(places) + 1), 1
    while count < most:
        count = min(most, count + max(1, count // 2))
        bounds = groups_of_even_length(chain.stages, places, count)
        for level in range(len(chain.levels)):
            yield _with(chain, bounds, level)


def _with(chain: Chain, bounds: Sequence[int], number: int) -> Offloaded:
    level, spans = chain.levels[number], list(pairwise(bounds))
    groups = [Group(first, end, level.stored) for first, end in spans]
    saved = [int(chain.crossing[at] + level.saved[at]) for at in spans[:-1]]
    held = []
    for place, at in enumerate(spans):
        near = saved[max(0, place - _BESIDE) : place + 1]
        own = chain.levels[-1] if at == spans[-1] else level
        held.append(int(own.held[at]) + sum(near))
    cost = sum(int(level.again[at]) for at in spans[:-1])
    groups[-1] = Group(*spans[-1], chain.levels[-1].stored)
    return Offloaded(chain.plan(groups), max(held), cost)

"""Plans meet their budget at the least cost."""

import itertools
import random
from collections.abc import Callable

import pytest

from jaxfleet.analysis.memory import Chain, cost_of, peak_of, plan_for, smallest_budget, stages_of
from jaxfleet.analysis.memory.chain import StageGroup
from tests.analysis.memory import steps
from tests.analysis.memory.oracle import Oracle
from tests.tiers import by_default

SMALL: dict[str, Callable[[random.Random], steps.Net]] = {
    "chain": lambda rng: steps.chain(rng, 4),
    "residual": lambda rng: steps.residual(rng, 1),
    "branches": lambda rng: steps.branches(rng, 1),
    "u-net": lambda rng: steps.u_net(rng, 1),
}
LARGE: dict[str, Callable[[random.Random], steps.Net]] = {
    "chain": lambda rng: steps.chain(rng, rng.randint(14, 20)),
    "residual": lambda rng: steps.residual(rng, rng.randint(4, 6)),
    "branches": lambda rng: steps.branches(rng, rng.randint(4, 5)),
    "u-net": lambda rng: steps.u_net(rng, rng.randint(3, 4)),
}


def all_plans(chain: Chain) -> list[tuple[int, int]]:
    """Returns peak and cost of every grouping, for all choices of its groups."""
    found = []
    values = range(len(chain.forward.values))
    for cuts in itertools.product([False, True], repeat=chain.stages - 1):
        bounds = [0, *(at + 1 for at, cut in enumerate(cuts) if cut), chain.stages]
        for chosen in itertools.product([False, True], repeat=len(values)):
            stored = frozenset(itertools.compress(values, chosen))
            groups = [StageGroup(first, end, stored) for first, end in itertools.pairwise(bounds)]
            plan = chain.plan(groups)
            found.append((peak_of(chain, plan), cost_of(chain, plan)))
    return found


@pytest.mark.parametrize("kind", SMALL)
def test_no_plan_at_all_that_meets_the_budget_costs_less(kind: str) -> None:
    chain = stages_of(steps.program_of(SMALL[kind](random.Random(kind))), {})
    plans, oracle = all_plans(chain), Oracle(chain)
    least, _ = smallest_budget(chain)
    assert least == min(peak for peak, _ in plans)
    for budget in range(least, max(peak for peak, _ in plans) + 1, 4):
        plan = plan_for(chain, budget)
        assert plan is not None
        assert peak_of(chain, plan) <= budget
        best = min(cost for peak, cost in plans if peak <= budget)
        assert oracle.cost(budget) == best
        assert cost_of(chain, plan) <= 1.1 * best


@pytest.mark.grid
@pytest.mark.parametrize("kind", by_default(LARGE, "residual", "u-net"))
def test_plans_of_up_to_60_operators_are_within_a_tenth_of_the_best(kind: str) -> None:
    for seed in range(4):
        net = LARGE[kind](random.Random(f"{kind}{seed}"))
        program = steps.program_of(net, clips=seed % 2 == 1)
        assert len(program.root.ops) <= 60
        chain = stages_of(program, {})
        oracle, (least, _) = Oracle(chain), smallest_budget(chain)
        most = int(chain.levels[-1].held[0, chain.stages])
        assert oracle.cost(least - 1) is None
        for part in (0, 0.1, 0.2, 0.4, 0.6, 0.8):
            budget = int(least + part * (most - least))
            plan, best = plan_for(chain, budget), oracle.cost(budget)
            assert plan is not None
            assert best is not None
            assert peak_of(chain, plan) <= budget
            assert best <= cost_of(chain, plan) <= 1.1 * best


def test_a_budget_under_the_smallest_is_not_met() -> None:
    chain = stages_of(steps.program_of(steps.chain(random.Random(1), 20)), {})
    least, plan = smallest_budget(chain)
    assert peak_of(chain, plan) == least
    assert plan_for(chain, least - 1) is None

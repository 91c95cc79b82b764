"""Plans of executables, compared with the optimum over single operators."""

import random
from collections.abc import Callable
from itertools import combinations

import pytest

from jaxfleet.analysis.memory import (
    Chain,
    RecomputePlan,
    peak_of,
    plan_for,
    smallest_budget,
    stages_of,
)
from tests.analysis.memory import steps
from tests.analysis.memory.exact import Choice, Step, exact_for, exact_smallest, run, step_of

NETS: dict[str, Callable[[random.Random], steps.Net]] = {
    "chain": lambda rng: steps.chain(rng, rng.randint(14, 20)),
    "residual": lambda rng: steps.residual(rng, rng.randint(4, 5)),
    "branches": lambda rng: steps.branches(rng, rng.randint(4, 5)),
    "u-net": lambda rng: steps.u_net(rng, rng.randint(3, 4)),
}


def kept_by(chain: Chain, plan: RecomputePlan) -> set[str]:
    """Returns the names that a plan keeps: saved, between groups, and in the last group."""
    found = set(plan.saved)
    for group in chain.groups(plan):
        for span in chain.forward.values:
            crosses = span.ends >= group.end or group.end == chain.stages
            if group.first <= span.begins < group.end and crosses:
                found.add(span.name)
    return found


def all_choices(chain: Chain, step: Step, count: int = 20) -> list[Choice]:
    """Returns plans for many budgets, with operators run one by one."""
    least, _ = smallest_budget(chain)
    most = int(chain.levels[-1].held[0, chain.stages])
    found = []
    for budget in {least + (most - least) * n // count for n in range(count + 1)}:
        plan = plan_for(chain, budget)
        assert plan is not None
        choice = run(step, kept_by(chain, plan))
        assert choice.peak <= peak_of(chain, plan) <= budget
        found.append(choice)
    return found


@pytest.mark.parametrize("kind", NETS)
def test_the_integer_program_is_right(kind: str) -> None:
    make = {
        "chain": lambda rng: steps.chain(rng, 8),
        "residual": lambda rng: steps.residual(rng, 2),
        "branches": lambda rng: steps.branches(rng, 2),
        "u-net": lambda rng: steps.u_net(rng, 1),
    }
    step = step_of(steps.program_of(make[kind](random.Random(kind))), {})
    every = [
        run(step, kept) for n in range(len(step.names) + 1) for kept in combinations(step.names, n)
    ]
    assert exact_smallest(step).peak == min(choice.peak for choice in every)
    for budget in {choice.peak for choice in every[::7]}:
        best = min(choice.cost for choice in every if choice.peak <= budget)
        found = exact_for(step, budget)
        assert found.peak <= budget
        assert found.cost == best


@pytest.mark.grid
@pytest.mark.parametrize("kind", NETS)
def test_plans_cost_little_more_than_the_best_order_of_operators(kind: str) -> None:
    over, smaller = [], []
    for seed in range(3):
        program = steps.program_of(NETS[kind](random.Random(f"{kind}{seed}")), clips=seed == 2)
        assert len(program.root.ops) <= 60
        step, chain = step_of(program, {}), stages_of(program, {})
        found, as_is = all_choices(chain, step), run(step, step.names)
        least = exact_smallest(step).peak
        low = min(choice.peak for choice in found)
        smaller.append(low / least)
        for part in (0.2, 0.5, 0.8):
            budget = int(low + part * (as_is.peak - low))
            best = exact_for(step, budget).cost
            mine = min(choice.cost for choice in found if choice.peak <= budget)
            assert mine >= best
            over.append(mine / best)
    # Executables hold all their inputs and outputs while they run, so plans avoid choices that cost
    # single operators nothing.
    assert sum(over) / len(over) <= 1.15
    assert sum(smaller) / len(smaller) <= 1.3

"""`build_strategy.memory_budget`: a fluid program on one device fits it, or is rejected."""

import re
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import StrategyError
from jaxfleet.fluid import layers
from tests.fluid.nets import fresh
from tests.fluid.parallel import batch, devices

FEEDS = [batch(64, seed) for seed in range(3)]


class Job:
    """A net with dropout in every layer, with new initial values."""

    def __init__(self, budget: Any = None, *, shares: bool = False, depth: int = 4) -> None:
        with fresh() as (self.main, startup):
            self.main.random_seed = startup.random_seed = 5
            hidden, y = fluid.data("x", [None, 6]), fluid.data("y", [None, 1], "int64")
            for _ in range(depth):
                more = layers.fc(layers.dropout(hidden, 0.2), 6, act="tanh")
                hidden = layers.elementwise_add(hidden, more)
            out = layers.fc(hidden, 3, act="softmax")
            self.loss = layers.mean(layers.cross_entropy(out, y))
            fluid.optimizer.Momentum(0.1, 0.9).minimize(self.loss)
            if shares:
                fluid.memory_optimize(self.main, {self.loss})
        self.exe, self.scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
        self.exe.run(startup, scope=self.scope)
        self.runs: Any = self.main
        if budget is not None:
            strategy = fluid.BuildStrategy()
            strategy.memory_budget = budget
            self.runs = fluid.CompiledProgram(self.main, build_strategy=strategy)

    def train(self, runs: Any = None) -> np.ndarray:
        program = runs if runs is not None else self.runs
        found = [self.exe.run(program, x, [self.loss], scope=self.scope)[0] for x in FEEDS]
        return np.concatenate(found)


@pytest.mark.grid
@pytest.mark.parametrize("shares", [False, True])
def test_a_program_fits_and_trains_the_same_with_the_same_masks(shares: bool) -> None:
    plain, fitted = Job(), Job(0.7, shares=shares)
    # Other executables fuse other operators: sums may differ in the last digits.
    np.testing.assert_allclose(fitted.train(), plain.train(), rtol=1e-5)
    report = fitted.runs.memory_report()
    assert report.after_bytes <= report.fit.budget == int(0.7 * report.before_bytes)
    assert report.executables[0] > 1
    for parameter in plain.main.all_parameters():
        x, y = (np.asarray(job.scope.peek(parameter.name)) for job in (fitted, plain))
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.grid  # the same planner as in tests/runtime/test_memory_budget.py
def test_what_cannot_be_met_is_refused_with_the_least_that_can() -> None:
    with pytest.raises(StrategyError, match="cannot be made to take 10 bytes") as error:
        Job(10, depth=2).train()
    (hint,) = error.value.__notes__[-1:]
    found = re.search(r"the least that it was made to take is ([\d,]+)", hint)
    assert found is not None
    least = int(found[1].replace(",", ""))
    # Conversely: the budget that a rejection names is met.
    job = Job(least, depth=2)
    assert np.isfinite(job.train()).all()
    assert job.runs.memory_report().after_bytes <= least


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "half", True])
def test_what_is_no_budget_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="memory_budget cannot be"):
        fluid.BuildStrategy().memory_budget = wrong


def test_where_nothing_is_planned_it_says_so() -> None:
    job = Job(0.5)
    with pytest.raises(StrategyError, match="has no budget of memory, or has not run"):
        job.runs.memory_report()
    strategy = fluid.BuildStrategy()
    strategy.memory_budget = 0.5
    made = fluid.CompiledProgram(job.main).with_data_parallel(job.loss.name, strategy)
    with devices(2), pytest.raises(StrategyError, match="on several devices"):
        job.train(made)

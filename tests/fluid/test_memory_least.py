"""After `memory_optimize` and `release_memory` a program takes fewer real bytes."""

import re
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import layers
from jaxfleet.runtime.memory_budget import WithinBudget
from tests.fluid.nets import fresh

WIDTH, ROWS, DEPTH = 256, 128, 6
FEED = {"x": np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)}


class Job:
    """Unrolled layers, trained by SGD; `rewrite` optimizes their memory."""

    def __init__(self, rewrite: Any = None, *, depth: int = DEPTH) -> None:
        with fresh() as (self.main, startup):
            self.main.random_seed = startup.random_seed = 5
            hidden = fluid.data("x", [None, WIDTH])
            for _ in range(depth):
                hidden = layers.fc(hidden, WIDTH, act="relu")
            self.loss = layers.mean(layers.square(hidden))
            fluid.optimizer.SGD(1e-3).minimize(self.loss)
            if rewrite is not None:
                rewrite(self.main, {self.loss.name})
        self.exe, self.scope = fluid.Executor(), fluid.Scope()
        self.exe.run(startup, scope=self.scope)

    def train(self, steps: int = 3) -> list[float]:
        found = [self.exe.run(self.main, FEED, [self.loss], scope=self.scope) for _ in range(steps)]
        return [float(value) for (value,) in found]

    @property
    def fitted(self) -> Any:
        """Result of the search for the one combination of feeds and fetches."""
        (plan,) = self.exe._local._plans._known.get(self.main).values()
        assert isinstance(plan.prepared.function, WithinBudget)
        (found,) = plan.prepared.function.fitted.values()
        return found


def with_log(program: fluid.Program, skip: set[str]) -> None:
    fluid.memory_optimize(program, skip, print_log=True)


def both(program: fluid.Program, skip: set[str]) -> None:
    fluid.memory_optimize(program, skip)
    fluid.release_memory(program, skip)


@pytest.mark.grid
def test_real_bytes_fall_and_results_stay_and_the_log_has_the_figure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = Job(with_log)
    capsys.readouterr()  # the report of shared names
    assert job.train() == Job().train()
    fitted = job.fitted
    taken = fitted.fit.after.bytes
    assert taken == fitted.after.peak().bytes <= 0.75 * fitted.fit.before
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"'main' takes \S+ MB besides its state, feeds and fetches, \S+ MB as it was, in \d+ "
        r"executables",
        line,
    )


@pytest.mark.grid
@pytest.mark.parametrize("rewrite", [fluid.release_memory, both])
def test_release_memory_lets_go_too(rewrite: Any) -> None:
    job = Job(rewrite)
    assert job.train() == Job().train()
    assert job.fitted.fit.after.bytes < job.fitted.fit.before


def test_a_small_program_stays_one_executable() -> None:
    job = Job(fluid.memory_optimize, depth=1)
    job.train(1)
    assert job.fitted.fit.passes == ()
    assert job.fitted.after.executables == (1, 1)

"""Final states of undisturbed jobs, computed once in this process, and smaller batches."""

import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from jaxfleet.runtime.simulated_job import Twin
from tests.faults import training
from tests.faults.memory_jobs import CACHE
from tests.faults.memory_training import captured, programs

Undisturbed = Callable[[str, int], dict[str, np.ndarray]]


@functools.cache
def train_undisturbed(kind: str, steps: int) -> dict[str, np.ndarray]:
    state, data = training.start(kind), list(training.batches(steps, kind))
    strategy = training.strategy(training.arguments([]))
    twin = Twin(captured(kind), strategy=strategy, servers=2, trainers=2, cache=CACHE)
    return training.named(twin.run(state, data).states[0])


@pytest.fixture(scope="session")
def undisturbed() -> Undisturbed:
    """Returns a function for the final state of a kind of job after `steps` steps."""
    return train_undisturbed


@pytest.fixture
def twelve_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trains on batches that one to four trainers can share."""
    caches = (captured, programs, train_undisturbed)
    monkeypatch.setattr(training, "ROWS", 12)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()

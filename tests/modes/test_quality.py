"""Quality cost of relaxed modes: the AUC of the click model of examples/ctr.py, against sync.

It is `benchmarks/ctr_quality.py`, which has five seeds and more rows, and 0.003 for its bar.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxfleet.lower import ExecutableCache

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# 58 steps, before any mode has converged. Sync with half of the rows, as if every other push were
# lost, is 0.014 below sync, and 0.032 with a quarter, one trainer's share. Measured here:
# async -0.002, dc_asgd -0.001, half_async 0.001, and geo 0.006, where a share of a row's last
# deltas is not yet exchanged.
MOST_BELOW = 0.010
LEAST_OF_SYNC = 0.71  # measured 0.716; an untrained model has 0.5


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yields the benchmark as a module; it imports from its folder, as scripts do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("ctr_quality")
    for name in ("ctr_quality", "common"):
        sys.modules.pop(name, None)


@pytest.mark.grid
def test_every_mode_comes_near_to_the_auc_of_sync(quality: Any) -> None:
    size, cache = quality.Size(rows=30_000, batch=512, test=20_000), ExecutableCache()

    def auc(rate: float, **options: Any) -> float:
        found: float = quality.auc_of(quality.example(rate), options, 0, size, cache)
        return found

    sync = auc(1.0)
    assert sync > LEAST_OF_SYNC
    below = {
        "async": sync - auc(0.5, communication="async"),
        "half_async": sync - auc(0.5, communication="half_async", merge=2),
        "geo": sync - auc(1.0, communication="geo", k_steps=2),
        "dc_asgd": sync - auc(0.5, communication="dc_asgd"),
    }
    assert {mode: lost for mode, lost in below.items() if lost > MOST_BELOW} == {}

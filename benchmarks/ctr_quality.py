"""Measures what relaxed modes cost in quality: the AUC of a click model against sync's.

    python benchmarks/ctr_quality.py [--quick]

The model and the planted clicks are those of examples/ctr.py. A job of four trainers and two
servers runs in one process (`jf.Twin`), which is the same every time, once for each mode and each
of five seeds. The bar: the mean AUC of a mode is at most 0.003 below that of sync.
"""

import argparse
import importlib.util
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from common import Bar, print_bars, print_table

import jaxfleet as jf
from jaxfleet.lower import ExecutableCache

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"communication": "async"},
    "half_async": {"communication": "half_async", "merge": 4},
    "geo": {"communication": "geo", "k_steps": 10},
    "dc_asgd": {"communication": "dc_asgd"},
}
TRAINERS, SERVERS, BATCH_ROWS, TEST_ROWS = 4, 2, 1024, 40_000
BAR = 0.003
HEADS = ("", "AUC", "least", "most", "below sync")


def example() -> ModuleType:
    """Returns examples/ctr.py, which is a script."""
    path = Path(__file__).resolve().parents[1] / "examples" / "ctr.py"
    spec = importlib.util.spec_from_file_location("ctr", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def auc_of(ctr: ModuleType, mode: str, seed: int, rows: int, cache: ExecutableCache) -> float:
    """Trains in one mode, and returns the AUC on rows that were not trained on."""
    data = list(ctr.batches(ctr.draw(rows, 10 * seed + 1), BATCH_ROWS))
    test, state = ctr.draw(TEST_ROWS, 10 * seed + 2), ctr.start(seed)
    strategy = jf.DistributedStrategy(mode="pserver", **MODES[mode])
    twin = jf.Twin(
        ctr.train_step, (state, data[0]), strategy, servers=SERVERS, trainers=TRAINERS, cache=cache
    )

    def script(step: Any) -> tuple[Any, tuple[Any, ...]]:
        now = jax.tree.map(lambda leaf: leaf, state)
        for batch in data:
            now, _ = step(now, batch)
        now = step.pull(now)
        return now, (ctr.auc(test.clicked, ctr.predict(step, now, test.keys)),)

    found: float = twin.play(script).metrics[0][0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="The benchmark ctr_quality.")
    parser.add_argument("--quick", action="store_true", help="one seed, few rows: a look")
    options = parser.parse_args()
    seeds, rows = ((0,), 60_000) if options.quick else (range(5), 200_000)
    ctr, cache, table, bars, sync = example(), ExecutableCache(), [], [], 0.0
    for mode in MODES:
        found = [auc_of(ctr, mode, seed, rows, cache) for seed in seeds]
        mean = statistics.mean(found)
        sync = sync or mean
        shown = (mean, min(found), max(found), sync - mean)
        table.append((mode, *(f"{value:.4f}" for value in shown)))
        print(*table[-1], flush=True)
        if mode != "sync":
            bars.append(Bar(f"AUC of {mode} below that of sync", sync - mean, BAR))
    print_table(HEADS, table)
    print_bars("ctr_quality", bars)


if __name__ == "__main__":
    main()

"""Quality cost of relaxed modes: the AUC of a click model, against sync.

    python benchmarks/ctr_quality.py [--quick]

The model and the planted clicks are those of examples/ctr.py. A job of four trainers and two
servers runs in one process (`jf.Twin`), which is deterministic, once for each mode and each of
five seeds. The bar: the mean AUC of a mode is at most 0.003 below that of sync.
"""

import argparse
import importlib.util
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import optax
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
# A relaxed trainer's gradient is that of a quarter of the rows, and four times as many are applied.
# The rates were chosen on seed 100, as the better of 1 and 0.5 times those of sync.
RATES = {"sync": 1.0, "async": 0.5, "half_async": 0.5, "geo": 0.5, "dc_asgd": 0.5}
TRAINERS, SERVERS = 4, 2
BAR = 0.003
HEADS = ("", "AUC", "least", "most", "below sync")


@dataclass(frozen=True)
class Size:
    """Numbers of rows: for training, in a step of all trainers, and for the test."""

    rows: int = 200_000
    batch: int = 1024
    test: int = 40_000


def example(rate: float) -> ModuleType:
    """Returns examples/ctr.py, which is a script, with scaled rates."""
    path = Path(__file__).resolve().parents[1] / "examples" / "ctr.py"
    spec = importlib.util.spec_from_file_location("ctr", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    optimizer = jf.tables.Adagrad(0.1 * rate, initial=0.0, epsilon=1e-12)
    spec_of_table = replace(module.table.spec, optimizer=optimizer)
    module.table = replace(module.table, spec=spec_of_table)  # type: ignore[attr-defined]
    module.tx = jf.distributed_optimizer(optax.adagrad(0.05 * rate))  # type: ignore[attr-defined]
    return module


def auc_of(
    ctr: ModuleType, options: Mapping[str, Any], seed: int, size: Size, cache: ExecutableCache
) -> float:
    """Trains in one mode; returns the AUC on held-out rows.

    Args:
        ctr: result of `example`.
        options: of the strategy: the mode and its parameters.
        seed: of rows and initial parameters.
        size: numbers of rows.
        cache: of executables, which are the same for all rates and seeds.
    """
    data = list(ctr.batches(ctr.draw(size.rows, 10 * seed + 1), size.batch))
    test, state = ctr.draw(size.test, 10 * seed + 2), ctr.start(seed)
    strategy = jf.DistributedStrategy(mode="pserver", **options)
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
    parser.add_argument("--rate", type=float, help="in the place of the modes' own")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    options = parser.parse_args()
    seeds, size = ((0,), Size(60_000)) if options.quick else (options.seeds, Size())
    cache, table, bars, sync = ExecutableCache(), [], [], 0.0
    for mode, chosen in MODES.items():
        ctr = example(options.rate or RATES[mode])
        found = [auc_of(ctr, chosen, seed, size, cache) for seed in seeds]
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

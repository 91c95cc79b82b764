"""Simulated schedules of faults a second, and the planted bugs that they find.

    python benchmarks/simulation.py [--schedules 500] [--first 10000]

Plays schedules in this process, on one core, after one of each mode, which compiles what jobs
share; none may break an invariant. Then plants each bug of `tests/testing/planted.py` and plays
schedules from 0 on until one finds it.
"""

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxfleet.testing.simulation import check, draw_schedule, explore
from tests.testing.planted import BUGS

WARM_UP = 60
MOST = 2_000
PACE_BAR = 10.0  # schedules in a second of one core


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The benchmark simulation.")
    parser.add_argument("--quick", action="store_true", help="100 schedules")
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--first", type=int, default=10_000, help="the first seed")
    arguments = parser.parse_args(words)
    logging.getLogger("jaxfleet").setLevel(logging.ERROR)
    count = 100 if arguments.quick else arguments.schedules
    seeds = range(arguments.first, arguments.first + count)
    for mode in {draw_schedule(seed).mode for seed in (*range(WARM_UP), *seeds)}:
        check(draw_schedule(arguments.first, mode))
    began, began_cpu = time.perf_counter(), time.process_time()
    ends: Counter[str] = Counter()
    failed = []
    for seed in seeds:
        schedule = draw_schedule(seed)
        run, broken = check(schedule)
        failed += [seed] * bool(broken)
        ends["must succeed"] += schedule.must_succeed
        ends["servers started again"] += any(end.starts > 1 for end in run.servers)
        ends["ended with errors"] += bool(run.errors)
        ends["messages"] += run.messages
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    print(f"{count} schedules: {count / took_s:.1f} a second, {1e3 * cpu_s / count:.0f} ms of CPU")
    print(", ".join(f"{name}: {number}" for name, number in ends.items()))
    found: dict[str, int | None] = {}
    for plant in BUGS:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            failure = next(explore(range(MOST)), None)
        found[plant.__name__] = None if failure is None else failure.schedule.seed
        print(f"{plant.__name__}: seed {found[plant.__name__]}")
    pace = count / cpu_s
    number = sum(seed is not None for seed in found.values())
    bars = [
        {"what": "schedules that break an invariant", "value": len(failed), "bar": 0,
         "ok": not failed},
        {"what": f"planted bugs found in {MOST} schedules", "value": number, "bar": len(BUGS),
         "ok": number == len(BUGS)},
        {"what": "schedules a second of CPU", "value": round(pace, 1), "bar": PACE_BAR,
         "ok": pace >= PACE_BAR},
    ]  # fmt: skip
    print(json.dumps({"name": "simulation", "failed": failed, "found": found, "bars": bars}))


if __name__ == "__main__":
    main()

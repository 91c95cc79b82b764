"""Paired comparison of two implementations of a step, against bars.

Times on a shared machine drift by more than the bars allow, so only measurements close in time are
compared. A round times the baseline A, the candidate B and a second copy of A, one right after the
other; the order changes from round to round, so that no side profits from its position. The result
is the median over the rounds of B/A, with the random deviation of A/A from 1.
"""

import argparse
import gc
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

import jaxfleet as jf

Step = Callable[[Any, Any], tuple[Any, Any]]
Measure = Callable[[int, "Plan"], Sequence["Bar"]]
Entry = dict[str, object]  # a bar in the last line

LONGEST_CHILD_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Duration of a measurement.

    On a busy machine `rounds` may be too few to tell A from itself. Rounds are added until the
    spread of A against itself is down to `wanted_spread`, or there are `most_rounds`.
    """

    rounds: int = 21
    most_rounds: int = 63
    wanted_spread: float = 0.02
    steps: int = 20  # in one timing; each step is waited for
    warm_up: int = 5


QUICK = Plan(rounds=7, most_rounds=7)


class Side:
    """One implementation of the step, with its current state.

    A step may donate its state, so each side owns a copy. With `waits` the step itself returns
    only when its results are ready, which is checked; otherwise the side waits for them. Two
    steps are never in flight at once: with emulated devices on few cores that can deadlock.
    """

    def __init__(self, step: Step, state: Any, batch: Any, *, waits: bool = False) -> None:
        self._step = step
        self._state = jax.tree.map(lambda leaf: leaf.copy(), state)
        self._batch = batch
        self._waits = waits
        self.advance()
        leaves = jax.tree.leaves(self._state)
        # Typed keys do not support it.
        if not all(leaf.is_ready() for leaf in leaves if hasattr(leaf, "is_ready")):
            raise RuntimeError("the step returned before its results were there: waits=False")

    def advance(self) -> None:
        results = self._step(self._state, self._batch)
        self._state, _ = results if self._waits else jax.block_until_ready(results)

    def seconds(self, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            self.advance()
        return time.perf_counter() - started


@dataclass(frozen=True)
class Comparison:
    """Result of the rounds."""

    baseline_ms: float  # for one step, as is the next
    candidate_ms: float
    ratio: float  # the median of B/A
    itself: tuple[float, float]  # the 95 % interval of the median of A/A

    @property
    def spread(self) -> float:
        """Plausible random deviation of the median of A/A from 1."""
        return max(abs(end - 1) for end in self.itself)


def compare(baseline: Side, candidate: Side, again: Side, plan: Plan) -> Comparison:
    """Times the three sides in alternating rounds; `again` is a second copy of `baseline`."""
    sides = (baseline, candidate, again)
    for side in sides:
        side.seconds(plan.warm_up)
    rounds: list[tuple[float, ...]] = []
    orders = itertools.cycle(itertools.permutations(range(3)))
    with no_collection():
        for order in itertools.islice(orders, plan.most_rounds):
            took = {index: sides[index].seconds(plan.steps) for index in order}
            rounds.append(tuple(took[index] for index in range(3)))
            enough = len(rounds) >= plan.rounds
            if enough and sum_up(rounds, steps=plan.steps).spread <= plan.wanted_spread:
                break
    return sum_up(rounds, steps=plan.steps)


def sum_up(rounds: Sequence[tuple[float, ...]], *, steps: int) -> Comparison:
    """Summarizes rounds of (A, B, A again), each in seconds for `steps` steps."""
    return Comparison(
        baseline_ms=1e3 / steps * statistics.median(a for a, _, _ in rounds),
        candidate_ms=1e3 / steps * statistics.median(b for _, b, _ in rounds),
        ratio=statistics.median(b / a for a, b, _ in rounds),
        itself=median_interval([again / a for a, _, again in rounds]),
    )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % confidence interval of the median, for any distribution.

    Its ends are two of the values: how many of n values lie under the true median is binomial,
    so they are the k-th from either end with k = n/2 - 1.96 sqrt(n)/2. Of 21 values these are
    the 6th and the 16th; of 7 or fewer, the first and the last.
    """
    count = len(values)
    rank = max(1, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    ordered = sorted(values)
    return ordered[rank - 1], ordered[count - rank]


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class Bar:
    """A number and its limit, apart from the measurement's `spread`."""

    what: str
    value: float
    bar: float
    spread: float = 0.0

    @property
    def ok(self) -> bool:
        return self.value <= self.bar + self.spread


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, the first column left-aligned and the others right-aligned."""
    columns = list(zip(heads, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    for line in (heads, *rows):
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells[1:]]), flush=True)


def print_bars(name: str, bars: Sequence[Bar]) -> None:
    """Prints a benchmark's last line; a spread is part of `what`, beside the number it widens."""
    entries: list[Entry] = []
    for bar in bars:
        what = f"{bar.what}, spread {bar.spread:.3f}" if bar.spread else bar.what
        entries.append({"what": what, "value": round(bar.value, 4), "bar": bar.bar, "ok": bar.ok})
    _print_entries(name, entries)


def run(name: str, script: str, measure: Measure, *, device_counts: Sequence[int]) -> None:
    """Measures for each number of devices, each in its own process, and prints all bars.

    A process can emulate only one number of devices, so the script calls itself with `--devices N`;
    call it so for a single number.
    """
    parser = argparse.ArgumentParser(description=f"The benchmark {name}.")
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a verdict")
    parser.add_argument("--devices", type=int, help="measure with this many alone")
    arguments = parser.parse_args()
    if arguments.devices is not None:
        jf.emulate_devices(arguments.devices)
        print_bars(name, measure(arguments.devices, QUICK if arguments.quick else Plan()))
        return
    entries: list[Entry] = []
    for devices in device_counts:
        options = ["--devices", str(devices), *(["--quick"] if arguments.quick else [])]
        entries += _measure_apart(script, options)
    _print_entries(name, entries)


def _measure_apart(script: str, options: Sequence[str]) -> list[Entry]:
    command = [sys.executable, script, *options]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=LONGEST_CHILD_S
    )
    *table, last = done.stdout.splitlines()
    print("\n".join(table), end="\n\n", flush=True)
    entries: list[Entry] = json.loads(last)["bars"]
    return entries


def _print_entries(name: str, entries: Sequence[Entry]) -> None:
    print(json.dumps({"name": name, "bars": entries}), flush=True)

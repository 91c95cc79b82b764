"""Measurements of tests/gallery's programs: `distribute`, steps on devices and through servers.

    python benchmarks/gallery.py [--quick] [--kind KIND ...] [NAME ...]

For each program, in one process: the CPU seconds of tracing it by jax, and those of `distribute`
(without compilation, for both); its step on 4 devices emulated on the CPU, against jax's own
partitioning of the same step (`jit`, the batch cut by a `NamedSharding`), in alternating rounds,
both donating; and its step as a job of 2 servers and 2 trainers in one process (`jf.Twin`), which
does the work of all of them. Bars: `distribute` takes at most twice the tracing and 1 s; a step at
most 1.1 of jax's plus the spread of jax's against itself. A rejection replaces a number.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Bar, Comparison, Plan, Side, compare, print_bars, print_table
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxfleet as jf
from jaxfleet.errors import JaxfleetError

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.gallery import KINDS
from tests.gallery.parts import Spread, arguments, state_of
from tests.zoo import Built
from tests.zoo.base import identity

DEVICES, ROWS, AXIS = 4, 64, "devices"
USUAL = Plan(rounds=15, most_rounds=31, steps=10, wanted_spread=0.05)
QUICK = Plan(rounds=5, most_rounds=5, steps=5, warm_up=2)
TWIN_STEPS = 12  # through servers, the first of which compile
HEADS = ("program", "tracing, CPU s", "distribute, CPU s", "jit, ms", "jaxfleet, ms",
         "over jit", "jit over itself", "through servers, ms")  # fmt: skip
REFUSED = "refused"


def main() -> None:
    parser = argparse.ArgumentParser(description="The programs of tests/gallery.")
    parser.add_argument("names", nargs="*", help="programs; all unless given")
    parser.add_argument("--kind", nargs="*", choices=sorted(KINDS), default=[])
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a verdict")
    given = parser.parse_args()
    jf.emulate_devices(DEVICES)
    warnings.simplefilter("ignore")  # about undivided steps: the tests cover them
    bars: list[Bar] = []
    table = []
    for name, build in chosen(given.kind, given.names):
        row, found = measure(name, build, QUICK if given.quick else USUAL)
        print(" ".join(row), file=sys.stderr, flush=True)
        table.append(row)
        bars += found
    print_table(HEADS, table)
    print_bars("gallery", bars)


def chosen(kinds: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields the requested programs, by default all."""
    for kind, programs in KINDS.items():
        for name, build in programs.items():
            if name in names or kind in kinds or not (names or kinds):
                yield name, build


def measure(name: str, build: Any, plan: Plan) -> tuple[list[str], list[Bar]]:
    """Returns a program's row of the table, and its bars."""
    tracing = cpu_seconds(lambda: traced(build(identity)))
    bars: list[Bar] = []
    try:
        distributing, times = on_devices(build, plan)
    except JaxfleetError:
        figures = [REFUSED, "", "", "", ""]
    else:
        figures = [f"{distributing:.2f}", *_written(times)]
        bars += [
            Bar(f"{name}: distribute, CPU s", distributing, 2 * tracing + 1),
            Bar(f"{name}: step over jit", times.ratio, 1.1, times.spread),
        ]
    try:
        served = f"{through_servers(build):.1f}"
    except JaxfleetError:
        served = REFUSED
    return [name, f"{tracing:.2f}", *figures, served], bars


def _written(times: Comparison) -> list[str]:
    ratio, itself = f"{times.ratio:.2f}", "{:.2f} to {:.2f}".format(*times.itself)
    return [f"{times.baseline_ms:.2f}", f"{times.candidate_ms:.2f}", ratio, itself]


def cpu_seconds(do: Callable[[], object]) -> float:
    """Returns the CPU seconds of a call in this process, over all threads."""
    before = time.process_time()
    do()
    return time.process_time() - before


def traced(built: Built) -> None:
    jax.jit(built.train_step).trace(*example(built))


def example(built: Built) -> tuple[Any, ...]:
    return arguments(built, built.state, built.batch(0, ROWS))


def on_devices(build: Any, plan: Plan) -> tuple[float, Comparison]:
    """Returns the CPU seconds of `distribute`, and the step's time beside jax's."""
    ours, made = build(jf.distributed_optimizer), []
    given = example(ours)
    strategy = jf.DistributedStrategy(devices=DEVICES)
    seconds = cpu_seconds(lambda: made.append(jf.distribute(ours.train_step, given, strategy)))
    theirs = build(identity)
    donated = len(theirs.state) if isinstance(theirs, Spread) else 1
    step = jax.jit(theirs.train_step, donate_argnums=tuple(range(donated)))
    state, batch = placed(theirs)
    a, again = (Side(_paired(theirs, step), state, batch) for _ in range(2))
    state, batch = placed(ours)  # whose optimizer may be a part of it, as in a TrainState
    return seconds, compare(a, Side(_paired(ours, made[0]), state, batch, waits=True), again, plan)


def placed(built: Built) -> tuple[Any, Any]:
    """Returns state and batch on the devices, partitioned by hand."""
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (AXIS,)))

    def place(leaf: Any) -> Any:
        return jax.device_put(leaf, rows if jnp.shape(leaf)[:1] == (ROWS,) else whole)

    state = jax.tree.map(lambda leaf: jax.device_put(jnp.array(leaf), whole), built.state)
    return state, jax.tree.map(place, built.batch(0, ROWS))


def _paired(built: Built, step: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Returns a step of a state and a batch that passes on all results."""

    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        results = step(*arguments(built, state, batch))
        return state_of(built, results), results

    return run


def through_servers(build: Any) -> float:
    """Returns the milliseconds of a step of a job of 2 servers and 2 trainers, in one process."""
    built = build(jf.distributed_optimizer)
    captured = jf.capture(built.train_step, example=example(built))
    of = captured.arguments
    start, batch = example(built) if of is None else of.split(example(built))

    def script(step: Any) -> tuple[Any, tuple[Any, ...]]:
        state, ends = start, []
        for _ in range(TWIN_STEPS):
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            ends.append(time.perf_counter())
        return state, tuple(ends)

    ends = jf.Twin(captured, servers=2, trainers=2).play(script).metrics[0]
    return 1e3 * float(np.median(np.diff(ends)[2:]))


if __name__ == "__main__":
    main()

"""Speed and memory of a server's table: its index and its updates; against a dense table.

    python benchmarks/table.py [--quick]

All runs in one thread, and the times are that thread's CPU time, so that other load on the machine
does not count (except for its share of caches and memory bandwidth).

Keys are any int64; 1 M of them have rows of 16 elements, and 10 M in the second half of the first
table. Requests have as many keys as there are rows (2 M at most), drawn evenly, or by zipf 1.2 as
in click logs. Bars: key to slot 30 M/s and SGD by slot 15 M rows/s at 1 M rows, for both
distributions. Gradients of that many rows are read from memory; those of a real step are in a
cache. `update: all` gets each key once, and also looks for NaN.

Memory is the growth of a separate process while 1 M rows are made, 4096 at a time, over the bytes
of its live rows: key, row, the optimizer's state and the step of the last touch. The longest pause
is that of any of those requests.

The dense table is JAX's option: 4 M x 16 parameters under a jitted and donated `optax.adam`, with a
gradient of 4096 rows that are not zero; ours looks 4096 rows up and updates them, of as many live
rows. The last bar is that step with keys drawn from 10**9 over the same with keys from 10**6.
"""

import argparse
import gc
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Bar, median_interval, print_bars, print_table

from jaxfleet.tables import Adagrad, Adam, Sgd, TableSpec, TableStore
from jaxfleet.tables.columns import Columns, Kind
from jaxfleet.tables.hash_index import Index
from jaxfleet.tables.optimizers import ROWS, update_of
from jaxfleet.tables.validation import Part

DIM = 16
LIVE = 1_000_000
MANY = 10_000_000
DENSE = 4_000_000
STEP = 4096  # unique keys
MOST_ASKED = 2_000_000
LEAST_FOUND, LEAST_UPDATED = 30.0, 15.0  # M/s
RANDOM = np.random.default_rng(0)

Timings = dict[str, float]  # M/s


def main() -> None:
    parser = argparse.ArgumentParser(description="The benchmark table.")
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a verdict")
    parser.add_argument("--memory", choices=["sgd", "adagrad", "adam"], help="be that process")
    arguments = parser.parse_args()
    if arguments.memory:
        print(*memory(arguments.memory))
        return
    rounds = 5 if arguments.quick else 21
    bars = [*speed(rounds), *memories(), dense(3 if arguments.quick else 7), key_space(rounds)]
    print_bars("table", bars)


def speed(rounds: int) -> list[Bar]:
    """Prints M/s of all parts; returns the bars: nanoseconds, as upper limits."""
    heads = ("M/s", *(f"{rows} M rows, {draw}" for rows in (1, 10) for draw in ("uniform", "zipf")))
    columns = [micro(rows, rounds, draw) for rows in (LIVE, MANY) for draw in (uniform, zipf)]
    rows = [[name, *(f"{column[name]:.1f}" for column in columns)] for name in columns[0]]
    print_table(heads, rows)
    bars = []
    for draw, column in zip(("uniform", "zipf"), columns[:2], strict=True):
        bars += [
            Bar(f"{name}, {draw}: ns", 1e3 / column[name], round(1e3 / least, 1))
            for name, least in (("key to slot", LEAST_FOUND), ("sgd by slot", LEAST_UPDATED))
        ]
    return bars


def uniform(live: np.ndarray) -> np.ndarray:
    drawn: np.ndarray = live[RANDOM.integers(0, len(live), min(len(live), MOST_ASKED))]
    return drawn


def zipf(live: np.ndarray) -> np.ndarray:
    ranks = RANDOM.zipf(1.2, min(len(live), MOST_ASKED))
    drawn: np.ndarray = live[np.minimum(ranks, len(live)) - 1]
    return drawn


def micro(count: int, rounds: int, draw: Callable[[np.ndarray], np.ndarray]) -> Timings:
    """Returns M/s of each part, at `count` live rows."""
    live = distinct_keys(count, 2**62)
    asked = draw(live)
    index = Index()
    index.add(live)
    slots = index.find(asked)
    grads = RANDOM.normal(size=(len(asked), DIM)).astype(np.float32)
    found = {"key to slot": rate(lambda: index.find(asked), len(asked), rounds)}
    for name, optimizer in (("sgd", Sgd()), ("adagrad", Adagrad()), ("adam", Adam())):
        columns, apply = ready(optimizer, count)
        work = partial(apply, columns, slots, grads, np.float32(1e-3))
        found[f"{name} by slot"] = rate(work, len(asked), rounds)
        if name == "sgd":
            gather = partial(columns[ROWS].take, slots)
            found["gather by slot"] = rate(gather, len(asked), rounds)
        del columns
    store = TableStore(TableSpec(name="t", dim=DIM))
    store.look_up(live)
    found["look_up: slot and gather"] = rate(lambda: store.look_up(asked), len(asked), rounds)
    unique = np.unique(asked)
    mine = grads[: len(unique)]
    found["update: all, sgd"] = rate(lambda: store.update(unique, mine), len(unique), rounds)
    return found


def ready(optimizer: Part, count: int) -> tuple[Columns, Callable[..., None]]:
    """Returns columns with rows and state for `count` slots, and a function that updates them."""
    update = update_of(optimizer, DIM)
    kinds = {name: state.kind for name, state in update.state.items()}
    columns = Columns({ROWS: Kind(np.float32, DIM), **kinds})
    columns.reserve(count)
    slots = np.arange(count, dtype=np.int32)
    for name, value in {ROWS: 0.0, **{n: s.initial for n, s in update.state.items()}}.items():
        columns[name].fill(slots, value)
    return columns, update.apply


def rate(work: Callable[[], object], count: int, rounds: int) -> float:
    """Returns M/s of the median round."""
    work()
    return count / 1e6 / statistics.median(seconds(work) for _ in range(rounds))


def seconds(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def wall_seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def distinct_keys(count: int, below: int) -> np.ndarray:
    """Returns `count` distinct keys in [0, `below`), in random order."""
    if below == count:
        return RANDOM.permutation(count)
    keys = np.unique(RANDOM.integers(0, below, count + count // 50 + 100))
    return RANDOM.permutation(keys)[:count]


def memories() -> list[Bar]:
    rows, bars = [], []
    for name in ("sgd", "adagrad", "adam"):
        command = [sys.executable, __file__, "--memory", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        grown, live, bare, pause = map(float, done.stdout.split())
        bars.append(Bar(f"{name}: resident bytes over those of live rows", grown / live, 1.25))
        values = (live / LIVE, grown / LIVE, grown / live, grown / bare, 1e3 * pause)
        rows.append([name, *(f"{value:.2f}" for value in values)])
    print()
    heads = ("bytes a row", "live", "resident", "ratio", "over key, row, state", "pause, ms")
    print_table(heads, rows)
    return bars


def memory(name: str) -> tuple[int, float, int, float]:
    """Returns the growth of this process in bytes, two sizes of live rows, and the pause."""
    optimizer = {"sgd": Sgd(), "adagrad": Adagrad(), "adam": Adam()}[name]
    keys = distinct_keys(LIVE, 2**62)
    grads = np.ones((STEP, DIM), np.float32)
    small = TableStore(TableSpec(name="t", dim=DIM, optimizer=optimizer))
    for begin in range(0, 8 * STEP, STEP):  # compiles everything
        small.update(keys[begin : begin + STEP], grads)
    del small
    gc.collect()
    before = resident()
    store = TableStore(TableSpec(name="t", dim=DIM, optimizer=optimizer))
    for begin in range(0, LIVE, STEP):
        some = keys[begin : begin + STEP]
        store.look_up(some)
        store.update(some, grads[: len(some)])
    gc.collect()
    grown, stats = resident() - before, store.stats()
    return grown, stats["bytes_live"], int(stats["bytes_live"]) - 4 * LIVE, stats["longest_pause_s"]


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def dense(rounds: int) -> Bar:
    """Compares a step of 4096 keys with that of a dense table under optax."""
    adam = optax.adam(1e-3)

    def dense_step(
        table: jax.Array, state: optax.OptState, ids: jax.Array, grads: jax.Array
    ) -> tuple[Any, optax.OptState]:
        whole = jnp.zeros_like(table).at[ids].set(grads)
        updates, state = adam.update(whole, state, table)
        return optax.apply_updates(table, updates), state

    compiled = jax.jit(dense_step, donate_argnums=(0, 1))
    table = jnp.zeros((DENSE, DIM))
    carried = (table, adam.init(table))
    ids = RANDOM.permutation(DENSE)[:STEP]
    grads = RANDOM.normal(size=(STEP, DIM)).astype(np.float32)
    store = TableStore(TableSpec(name="t", dim=DIM, optimizer=Adam()))
    store.look_up(RANDOM.permutation(DENSE))

    def ours() -> None:
        store.look_up(ids)
        store.update(ids, grads)

    dense_s, our_s = [], []
    for _ in range(rounds + 1):
        started = time.perf_counter()  # on all cores, JAX's default
        carried = jax.block_until_ready(compiled(*carried, jnp.asarray(ids), jnp.asarray(grads)))
        dense_s.append(time.perf_counter() - started)
        our_s.append(min(wall_seconds(ours) for _ in range(5)))
    theirs_ms, ours_ms = (1e3 * statistics.median(times[1:]) for times in (dense_s, our_s))
    print(
        f"\ndense optax.adam {theirs_ms:.1f} ms, ours {ours_ms:.2f} ms: {theirs_ms / ours_ms:.0f}x"
    )
    return Bar("our step over a tenth of the dense one", 10 * ours_ms / theirs_ms, 1.0)


def key_space(rounds: int) -> Bar:
    """Compares steps with keys from 10**9 and from 10**6, each with 1 M live rows."""
    small, large, again = (stepper(below) for below in (10**6, 10**9, 10**6))
    ratios, itself = [], []
    orders = itertools.cycle(itertools.permutations(range(3)))
    for order in itertools.islice(orders, rounds + 1):
        took = {at: seconds((small, large, again)[at]) for at in order}
        ratios.append(took[1] / took[0])
        itself.append(took[2] / took[0])
    ratio = statistics.median(ratios[1:])
    low, high = median_interval(itself[1:])
    print(f"\nkeys of 10**9 over keys of 10**6: {ratio:.3f} (itself {low:.3f}-{high:.3f})")
    spread = max(abs(end - 1) for end in (low, high))
    return Bar("step with keys of 10**9 over 10**6", ratio, 1.15, spread)


def stepper(below: int) -> Callable[[], None]:
    """Returns a function that runs 20 steps on a new table."""
    live = distinct_keys(LIVE, below)
    store = TableStore(TableSpec(name="t", dim=DIM, optimizer=Adagrad()))
    store.look_up(live)
    grads = RANDOM.normal(size=(STEP, DIM)).astype(np.float32)
    batches: Sequence[np.ndarray] = [RANDOM.permutation(live)[:STEP] for _ in range(20)]

    def steps() -> None:
        for keys in batches:
            store.look_up(keys)
            store.update(keys, grads)

    return steps


if __name__ == "__main__":
    main()

"""Memory and time of a step with `memory_budget`, against the plain step and `jax.checkpoint`.

    python benchmarks/memory.py [--quick] [--only NAME ...] [--optimizer NAME ...]
    python benchmarks/memory.py --zoo [ENTRY ...]

Six programs with unrolled layers, each a whole training step, with SGD and with Adam after clipping
by the global norm. The peak is defined in docs/memory.md: xla's temporary bytes, and for a step of
several executables also the values between them. Ours gets a budget of a third of the peak; if that
is impossible, the next of 0.4, 0.5, 0.7. The bar is a third at 1.2 of the time, on at least four of
the six programs. A seventh, with 8,192 rows, is for its RSS.

Steps are timed in turns in one process. CPU time, of all threads, is the better measure on a shared
machine. RSS is of a process with one implementation only: its growth while steps ran, including a
copy of the state, and its maximum, including compilation.

`--zoo` sets a budget of half of the memory of each program of tests/zoo, and compares peak and
results with the plain step: never more, and the same numbers.
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import print_table

import jaxfleet as jf
from jaxfleet.errors import CaptureError, StrategyError

Layer = Callable[[Any, Any], Any]
SHARES = (1 / 3, 0.4, 0.5, 0.7)
TIME_BAR, SHARE_BAR, WANTED = 1.2, 1 / 3, 4
LONGEST_S = 1800.0
POLICIES: Mapping[str, Any] = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots without batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
HEADS = ("", "MB", "of it", "ms", "of it", "CPU ms", "of it", "made, s", "RSS rises, most")
ALONE = ("as it is", "memory_budget")  # RSS is measured too


@dataclass(frozen=True)
class Stack:
    """A network as a list of layers, first and last included.

    Attributes:
        params: of each layer.
        layers: the functions.
        batch: of training data.
    """

    params: list[Any]
    layers: list[Layer]
    batch: Any


def mlp(blocks: int, *, width: int = 512, rows: int = 512) -> Stack:
    """Returns a stack of residual blocks."""
    keys = jax.random.split(jax.random.key(0), blocks)
    params = [{"w": _normal(key, width, width), "b": jnp.zeros(width)} for key in keys]
    batch = _random(rows, width), _random(rows, width)
    return Stack(params, [_dense] * blocks, batch)


def _dense(p: Any, h: Any) -> Any:
    return h + jax.nn.gelu(h @ p["w"] + p["b"])


def transformer(blocks: int, *, dim: int = 128, length: int = 128, rows: int = 16) -> Stack:
    """Returns a stack of blocks of attention with 4 heads and an MLP."""
    params = []
    for key in jax.random.split(jax.random.key(0), blocks):
        a, b, c, d = jax.random.split(key, 4)
        params.append(
            {
                "qkv": _normal(a, dim, 3 * dim),
                "out": _normal(b, dim, dim),
                "up": _normal(c, dim, 4 * dim),
                "down": _normal(d, 4 * dim, dim),
            }
        )
    batch = _random(rows, length, dim), _random(rows, length, dim)
    return Stack(params, [_attend] * blocks, batch)


def _attend(p: Any, h: Any) -> Any:
    x = _normalized(h)
    q, k, v = jnp.split((x @ p["qkv"]).reshape(*h.shape[:2], 4, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(h.shape)
    h = h + mixed @ p["out"]
    return h + jax.nn.gelu(_normalized(h) @ p["up"]) @ p["down"]


def _normalized(h: Any) -> Any:
    centered = h - h.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-6)


def cnn(blocks: int = 16, *, features: int = 32, size: int = 32, rows: int = 32) -> Stack:
    """Returns a stack of residual convolutions over one size of image."""
    keys = jax.random.split(jax.random.key(0), blocks)
    params = [{"w": 0.1 * jax.random.normal(key, (3, 3, features, features))} for key in keys]
    batch = _random(rows, size, size, features), _random(rows, size, size, features)
    return Stack(params, [_convolve] * blocks, batch)


def _convolve(p: Any, h: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return h + jax.nn.relu(
        jax.lax.conv_general_dilated(h, p["w"], (1, 1), "SAME", dimension_numbers=numbers)
    )


def _normal(key: Any, *shape: int) -> Any:
    return jax.random.normal(key, shape) * shape[0] ** -0.5


def _random(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


PROGRAMS: Mapping[str, Callable[[], Stack]] = {
    "mlp 24": lambda: mlp(24),
    "mlp 48": lambda: mlp(48),
    "mlp 96": lambda: mlp(96),
    "transformer 12": lambda: transformer(12),
    "transformer 24": lambda: transformer(24),
    "cnn 16": cnn,
}
FOR_RSS = "mlp 24, 8192 rows"
ALL: Mapping[str, Callable[[], Stack]] = {**PROGRAMS, FOR_RSS: lambda: mlp(24, rows=8192)}
OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(1e-3),
    "adam": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
}


def train_step(stack: Stack, tx: Any, policy: Any = None) -> Callable[[Any, Any], Any]:
    """Returns the step; with a policy, every block is wrapped by `jax.checkpoint`."""
    layers = stack.layers
    if policy is not None:
        wrapped = {layer: jax.checkpoint(layer, policy=policy) for layer in set(layers)}
        layers = [wrapped[layer] for layer in layers]

    def step(state: Any, batch: Any) -> Any:
        params, opt = state

        def loss_of(params: Any) -> Any:
            h = batch[0]
            for layer, p in zip(layers, params, strict=True):
                h = layer(p, h)
            return ((h - batch[1]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    return step


@dataclass(frozen=True)
class Way:
    """One implementation of a step: its memory, and a function that runs it."""

    peak: int
    run: Callable[[Any, Any], Any]


Times = tuple[float, float]  # of a step: wall and CPU, in ms


def by_hand(stack: Stack, tx: Any, policy: Any = None) -> Way:
    """Compiles a step by `jax.jit` with donation."""
    step = jax.jit(train_step(stack, tx, policy), donate_argnums=0)
    state = (stack.params, tx.init(stack.params))
    analysis: Any = step.lower(state, stack.batch).compile().memory_analysis()
    return Way(int(analysis.temp_size_in_bytes), step)


def ours(stack: Stack, tx: Any) -> Way:
    """Compiles it with the smallest feasible budget."""
    tx = jf.distributed_optimizer(tx)
    example = ((stack.params, tx.init(stack.params)), stack.batch)
    for share in SHARES:
        strategy = jf.DistributedStrategy(mode="single", memory_budget=share)
        try:
            step: Any = jf.distribute(train_step(stack, tx), example, strategy)
        except StrategyError as error:
            print(f"  {share:.2f}: {error} {error.__notes__}", file=sys.stderr)
            continue
        return Way(step.memory_report().after_bytes, step)
    return by_hand(stack, tx)


def ways(stack: Stack, tx: Any) -> dict[str, Callable[[], Way]]:
    """Returns every implementation of a step, by name; each compiles on demand."""
    found: dict[str, Callable[[], Way]] = {"as it is": partial(by_hand, stack, tx)}
    for name, policy in POLICIES.items():
        found[f"checkpoint, {name}"] = partial(by_hand, stack, tx, policy)
    return {**found, "memory_budget": partial(ours, stack, tx)}


def timed(way: Way, stack: Stack, tx: Any, steps: int) -> Times:
    """Returns the median times of a step."""
    state = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), stack.params)
    state, clock, cpu = (state, tx.init(state)), list[float](), list[float]()
    for _ in range(steps):
        start, used = time.perf_counter(), time.process_time()
        state, loss = way.run(state, stack.batch)
        jax.block_until_ready((state, loss))
        clock.append(1e3 * (time.perf_counter() - start))
        cpu.append(1e3 * (time.process_time() - used))
    return statistics.median(clock), statistics.median(cpu)


def measure(program: str, optimizer: str, *, rounds: int, only: str | None) -> dict[str, Any]:
    """Measures all implementations in turns, or only one in its own process, for its RSS."""
    stack, tx = ALL[program](), OPTIMIZERS[optimizer]()
    named = {name: make for name, make in ways(stack, tx).items() if only in {None, name}}
    made, found = dict[str, Way](), dict[str, dict[str, Any]]()
    for name, make in named.items():
        start = time.perf_counter()
        made[name] = make()
        found[name] = {"peak": made[name].peak, "made_s": time.perf_counter() - start}
    times: dict[str, list[Times]] = {name: [] for name in made}
    for number in range(rounds + 1):  # the first round warms up
        if number == 1:
            before, at_rest = highest_rss(), forget_rss()
        order = list(made)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            times[name].append(timed(made[name], stack, tx, 3))
    for name, values in found.items():
        clock, cpu = zip(*times[name][1:], strict=True)
        values["ms"], values["cpu_ms"] = statistics.median(clock), statistics.median(cpu)
        values["rise"] = highest_rss() - at_rest
        values["rss"] = max(before, highest_rss())
    return found


def forget_rss() -> float:
    """Returns unused memory to the system; returns the RSS, now also the maximum."""
    libc: Any = ctypes.CDLL("libc.so.6")
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return highest_rss()


def highest_rss() -> float:
    """Returns the maximum RSS of the process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def child(*args: str) -> dict[str, Any]:
    """Measures in its own process."""
    command = [sys.executable, __file__, "--child", *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LONGEST_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(program: str, optimizer: str, rounds: int) -> bool:
    """Prints all implementations for one program; returns whether the bar holds."""
    alone = {name: child(program, optimizer, "1", name)[name] for name in ALONE}
    found = alone if program == FOR_RSS else child(program, optimizer, str(rounds))
    for name, of in alone.items():
        found[name] |= {kind: of[kind] for kind in ("rise", "rss")}
    base = found["as it is"]
    rows = []
    for name, of in found.items():
        rss = f"{of['rise']:.0f}, {of['rss']:.0f}" if name in ALONE else ""
        parts = [(of["peak"] / 1e6, ".1f", of["peak"] / base["peak"])]
        parts += [(of[kind], ".0f", of[kind] / base[kind]) for kind in ("ms", "cpu_ms")]
        cells = [text for x, form, part in parts for text in (f"{x:{form}}", f"{part:.2f}")]
        rows.append((f"{program}, {optimizer}: {name}", *cells, f"{of['made_s']:.0f}", rss))
    print_table(HEADS, rows)
    mine = found["memory_budget"]
    small = mine["peak"] <= SHARE_BAR * base["peak"]
    return bool(small and mine["ms"] <= TIME_BAR * base["ms"])


def main() -> None:
    """Runs the measurements of the command line."""
    if sys.argv[1:2] == ["--child"]:
        program, optimizer, count, *only = sys.argv[2:]
        found = measure(program, optimizer, rounds=int(count), only=only[0] if only else None)
        print(json.dumps(found))
        return
    parser = argparse.ArgumentParser(description="Measures steps with a budget of memory.")
    parser.add_argument("--quick", action="store_true", help="few rounds; the figures are rough")
    parser.add_argument("--only", nargs="*", choices=[*ALL], help="these programs")
    parser.add_argument("--optimizer", nargs="*", choices=[*OPTIMIZERS], default=[*OPTIMIZERS])
    parser.add_argument("--zoo", nargs="*", metavar="ENTRY", help="all programs of tests/zoo")
    args = parser.parse_args()
    if args.zoo is not None:
        sys.exit(zoo(args.zoo))
    rounds = 2 if args.quick else 7
    for optimizer in args.optimizer:
        met = {name: compare(name, optimizer, rounds) for name in args.only or ALL}
        met.pop(FOR_RSS, None)
        print(json.dumps({"optimizer": optimizer, "met": met, "wanted": WANTED}))


def zoo(names: list[str]) -> int:
    """Prints the effect of a budget of half on zoo programs; returns the number of failures."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.runtime.budgets import outcome  # noqa: PLC0415  # only here: not installed
    from tests.zoo import ZOO  # noqa: PLC0415

    worse = 0
    for name in names or ZOO:
        start = time.process_time()
        try:
            text = str(outcome(ZOO[name], 0.5))
        except AssertionError as error:
            text, worse = f"WORSE: {error}", worse + 1
        except CaptureError as error:  # an entry that demonstrates a rejection
            text = f"refused, as without a budget: {error}"
        print(f"{name:28} {time.process_time() - start:5.1f} s  {text}", flush=True)
    print(json.dumps({"programs": len(names or ZOO), "worse": worse}))
    return worse


if __name__ == "__main__":
    main()

"""Time of a step of two processes that train together, without servers.

    python benchmarks/multiprocess.py [--quick] [--processes 2]

An MLP, 784-1024-1024-10, trained by Adam on 64 rows a process in three implementations, each in its
own processes, on the cores of one machine, over gloo.

- by hand: `jax.distributed`, and a donated `jit(shard_map)` with `lax.pmean` on the gradients;
- jaxfleet: the same one-device step, `strategy="collective"`;
- torch: DistributedDataParallel, one thread a process as `torchrun` sets it, its buckets views of
  the gradients and Adam fused, its fastest configuration. Needs the extra `bench`.

All processes live from the beginning to the end and idle while others are timed: rounds of a few
steps go to one implementation after another, in changing order. Batches come from the host at each
step, on all sides. Bars: jaxfleet over torch at most 1, and over by hand at most 1.02, plus the
spread of by hand against itself.
"""

import argparse
import importlib.util
import itertools
import os
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Bar, median_interval, print_bars, print_table
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxfleet as jf
from jaxfleet.launch.placement import Ports

SIZES = (784, 1024, 1024, 10)
ROWS = 64  # a process's
WARM_UP = 40  # steps
STEPS = 10  # in one timing
LONGEST_S = 300.0  # until a process answers
HEADS = ("", "step, ms", "fastest tenth, ms", "jaxfleet over it", "CPU a process, ms")
HAND, OURS, TORCH = "by hand", "jaxfleet", "torch"
Advance = Callable[[], None]


def batch_of(rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rank)
    x = rng.normal(size=(ROWS, SIZES[0])).astype(np.float32)
    return {"x": x, "y": rng.integers(0, SIZES[-1], ROWS).astype(np.int32)}


def begin(tx: optax.GradientTransformation) -> Any:
    rng = np.random.default_rng(0)
    pairs = itertools.pairwise(SIZES)
    params = [
        {"w": (rng.normal(size=(m, n)) / np.sqrt(m)).astype(np.float32), "b": jnp.zeros(n)}
        for m, n in pairs
    ]
    return {"params": params, "opt": tx.init(params)}


def loss_of(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    logits = x @ params[-1]["w"] + params[-1]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def trained_by(tx: optax.GradientTransformation, axis: str | None) -> Callable[[Any, Any], Any]:
    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        if axis is not None:
            loss, grads = jax.lax.pmean((loss, grads), axis)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return train_step


def by_hand(rank: int, endpoints: Sequence[str]) -> Advance:
    jax.distributed.initialize(endpoints[0], len(endpoints), rank)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    tx = optax.adam(1e-3)
    local = jax.shard_map(
        trained_by(tx, "data"), mesh=mesh, in_specs=(whole, rows), out_specs=whole, check_vma=False
    )
    step, cut = jax.jit(local, donate_argnums=0), NamedSharding(mesh, rows)
    host = begin(tx)
    state = jax.tree.map(
        lambda x: jax.make_array_from_callback(
            np.shape(x), NamedSharding(mesh, whole), lambda index: np.asarray(x)[index]
        ),
        host,
    )
    batch = batch_of(rank)

    def advance() -> None:
        nonlocal state
        given = {k: jax.make_array_from_process_local_data(cut, v) for k, v in batch.items()}
        state, _ = jax.block_until_ready(step(state, given))

    return advance


def by_jaxfleet(rank: int, endpoints: Sequence[str]) -> Advance:
    os.environ["PADDLE_TRAINER_ENDPOINTS"] = ",".join(endpoints)
    os.environ["PADDLE_TRAINER_ID"] = str(rank)
    jf.initialize(lost_after_s=60)
    tx = jf.distributed_optimizer(optax.adam(1e-3))
    state, batch = begin(tx), batch_of(rank)
    strategy = jf.DistributedStrategy(batch="local")
    step = jf.distribute(trained_by(tx, None), example=(state, batch), strategy=strategy)

    def advance() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(step(state, batch))

    return advance


def by_torch(rank: int, endpoints: Sequence[str]) -> Advance:
    import torch  # noqa: PLC0415  # of an extra, and only this process needs it
    from torch import distributed, nn  # noqa: PLC0415

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{endpoints[0]}", rank=rank, world_size=len(endpoints)
    )
    layers = [nn.Linear(m, n) for m, n in itertools.pairwise(SIZES)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    together = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    adam = torch.optim.Adam(together.parameters(), 1e-3, fused=True)
    entropy, batch = nn.CrossEntropyLoss(), batch_of(rank)

    def advance() -> None:
        x, y = torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"].astype(np.int64))
        adam.zero_grad(set_to_none=True)
        entropy(together(x), y).backward()
        adam.step()

    return advance


WAYS = {HAND: by_hand, OURS: by_jaxfleet, TORCH: by_torch}


def be(way: str, rank: int, endpoints: Sequence[str]) -> None:
    """Runs one process: reads numbers of steps, and reports their times."""
    advance = WAYS[way](rank, endpoints)
    for line in sys.stdin:
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            advance()
        print("took", time.perf_counter() - started, time.process_time() - cpu, flush=True)
    os._exit(0)  # an orderly shutdown is no part of the benchmark


class Side:
    """The processes of one implementation."""

    def __init__(self, way: str, processes: int) -> None:
        self.way, self.cpu_s = way, 0.0
        ports = Ports(processes)
        self.children = []
        for rank in range(processes):
            command = [sys.executable, __file__, "--be", way, "--rank", str(rank)]
            command += ["--endpoints", ",".join(ports.endpoints)]
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # `select` does not see buffered lines
                env={**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
            )
            self.children.append(child)
            ports.give(rank)
        self.seconds(WARM_UP)
        self.cpu_s = 0.0

    def seconds(self, steps: int) -> float:
        """Runs `steps` steps in all processes; returns the time of the slowest."""
        for child in self.children:
            assert child.stdin is not None
            child.stdin.write(f"{steps}\n".encode())
            child.stdin.flush()
        found = [_answer(child, f"{self.way}, rank {r}") for r, child in enumerate(self.children)]
        self.cpu_s += statistics.mean(cpu for _, cpu in found)
        return max(took for took, _ in found)

    def kill(self) -> None:
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait()


def _answer(child: "subprocess.Popen[bytes]", who: str) -> tuple[float, float]:
    """Returns the times that a process reports: wall and CPU seconds."""
    assert child.stdout is not None
    until = time.monotonic() + LONGEST_S
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while ready.select(max(0.0, until - time.monotonic())):
            line = child.stdout.readline()
            if not line:
                raise RuntimeError(f"{who} ended: {child.wait()}")
            if line.startswith(b"took "):
                took, cpu = line.split()[1:]
                return float(took), float(cpu)
    raise RuntimeError(f"{who} said nothing for {LONGEST_S:g} s")


@contextmanager
def all_sides(ways: Sequence[str], processes: int) -> Iterator[dict[str, Side]]:
    sides: dict[str, Side] = {}
    try:
        for way in ways:
            sides[way] = Side(way, processes)
        yield sides
    finally:
        for side in sides.values():
            side.kill()


def measure(processes: int, rounds: int) -> list[Bar]:
    ways = [HAND, OURS]
    if importlib.util.find_spec("torch") is not None:
        ways.append(TORCH)
    else:
        print("torch is left out: pip install 'jaxfleet[bench]' brings it", file=sys.stderr)
    timed = [*ways, HAND]  # by hand twice, for its deviation from itself
    found: list[list[float]] = []
    with all_sides(ways, processes) as sides:
        for number in range(rounds):
            first = number % len(timed)
            order = [*range(first, len(timed)), *range(first)][:: 1 if number % 2 else -1]
            took = {index: sides[timed[index]].seconds(STEPS) / STEPS for index in order}
            found.append([took[index] for index in range(len(timed))])
        cpu = {way: side.cpu_s / rounds / STEPS for way, side in sides.items()}
    cpu[HAND] /= 2
    by_way = {way: [row[index] for row in found] for index, way in enumerate(ways)}
    print_table(HEADS, [_row(way, by_way, cpu[way]) for way in ways])
    spread = max(abs(end - 1) for end in median_interval([row[-1] / row[0] for row in found]))
    what = f"jaxfleet over {{}}, {processes} processes"
    bars = [Bar(what.format(HAND), _ratio(by_way, HAND), 1.02, spread)]
    if TORCH in ways:
        bars.append(Bar(what.format(TORCH), _ratio(by_way, TORCH), 1.0, spread))
    return bars


def _ratio(by_way: dict[str, list[float]], way: str) -> float:
    return statistics.median(x / y for x, y in zip(by_way[OURS], by_way[way], strict=True))


def _row(way: str, by_way: dict[str, list[float]], cpu_s: float) -> list[str]:
    seconds = sorted(by_way[way])
    fastest = seconds[len(seconds) // 10]
    median = statistics.median(seconds)
    numbers = [f"{1e3 * median:.2f}", f"{1e3 * fastest:.2f}", f"{_ratio(by_way, way):.3f}"]
    return [way, *numbers, f"{1e3 * cpu_s:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="The benchmark multiprocess.")
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a verdict")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--be", choices=list(WAYS), help="be one process of this way")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--endpoints", default="")
    arguments = parser.parse_args()
    if arguments.be is not None:
        be(arguments.be, arguments.rank, arguments.endpoints.split(","))
        return
    print_bars("multiprocess", measure(arguments.processes, 8 if arguments.quick else 24))


if __name__ == "__main__":
    main()

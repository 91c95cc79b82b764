"""Time of a step of trainers and servers as processes, on the cores of one machine.

    python benchmarks/pserver_step.py [--quick]

The model is an MLP, 784-1024-1024-10, trained by Adam on 64 rows a trainer: 7.4 MB of parameters
go each way between each trainer and the servers. `jaxfleet.launch` starts the processes. The
result is the median of a step's time over all trainers. For comparison: one process that computes
the same step alone, without servers; a trainer's step without any communication (its segments
alone); the bytes that a trainer sends and receives in a step, and their rate. The first 200 steps
do not count: until then processes touch new memory.

The bar is 20 ms for 2 trainers and 1 server, on 2 cores.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Bar, print_bars, print_table

import jaxfleet as jf
from jaxfleet.ir import Program
from jaxfleet.lower import ExecutableCache
from jaxfleet.lower.host_transfer import device_dtype
from jaxfleet.lower.partition import Segment, rows_of, segments

SIZES = (784, 1024, 1024, 10)
ROWS = 64  # a trainer's
BAR_MS = 20.0
LONGEST_S = 600.0
WARM_UP = 200  # steps: touching new memory costs time, and jobs run for weeks
HEADS = ("", "step, ms", "fastest tenth, ms", "MB each way", "goodput, GB/s")


def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> jax.Array:
        x = batch["x"]
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        logits = x @ params[-1]["w"] + params[-1]["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt_state = optimizer().update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, {"loss": loss}


def optimizer() -> optax.GradientTransformation:
    return jf.distributed_optimizer(optax.adam(1e-3))


def start(rows: int) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), len(SIZES) - 1)
    params = [
        {"w": jax.random.normal(key, (m, n)) / np.sqrt(m), "b": jnp.zeros(n)}
        for key, m, n in zip(keys, SIZES, SIZES[1:], strict=False)
    ]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, SIZES[0])).astype(np.float32)
    y = rng.integers(0, SIZES[-1], rows).astype(np.int32)
    return {"params": params, "opt_state": optimizer().init(params)}, {"x": x, "y": y}


def train(mode: str, trainers: int, steps: int, out: Path | None, cuts: int) -> list[float]:
    """Trains in this process; returns the seconds of each step."""
    state, batch = start(ROWS * trainers)
    strategy = jf.DistributedStrategy(mode=mode, send_cuts=cuts)  # type: ignore[arg-type]
    step = jf.distribute(train_step, example=(state, batch), strategy=strategy)
    seconds = []
    for _ in range(steps + WARM_UP):
        started = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - started)
    if out is not None:
        client = step.client  # type: ignore[union-attr]
        sent = client.sent_bytes / len(seconds)
        name = out / f"trainer{client.me.trainer}.json"
        name.write_text(json.dumps({"seconds": seconds[WARM_UP:], "bytes": sent}))
    return seconds[WARM_UP:]


def compute_only(trainers: int, steps: int) -> list[float]:
    """Returns the seconds of a trainer's segments, run in sequence without communication."""
    state, batch = start(ROWS * trainers)
    strategy = jf.DistributedStrategy(mode="pserver")
    twin = jf.Twin(train_step, (state, batch), strategy, servers=1, trainers=trainers)
    program = twin.programs().trainer
    numbers = rows_of(program, ROWS)
    plan = segments(program, numbers, cache=ExecutableCache())
    held = {name: _some(program, name) for name in program.variables}
    seconds = []
    for _ in range(steps + WARM_UP):
        started, values = time.perf_counter(), dict(held)
        for item in plan:
            if isinstance(item, Segment):
                made = item.run(np.int32(0), *[values[name] for name in item.reads])
                made = jax.block_until_ready(made)  # including the check for finite values
                values.update(zip(item.writes, made, strict=False))
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UP:]


def _some(program: Program, name: str) -> jax.Array:
    """Returns an array for a variable: the time of a segment does not depend on values."""
    variable = program.variables[name]
    shape = tuple(size if isinstance(size, int) else ROWS for size in variable.shape)
    return jnp.full(shape, 0.01, device_dtype(variable.dtype))


def launched(servers: int, trainers: int, steps: int, cuts: int) -> tuple[list[float], float]:
    """Trains in processes; returns the seconds of all trainers' steps, and the bytes per step."""
    with tempfile.TemporaryDirectory() as folder:
        child = [__file__, "--out", folder, "--steps", str(steps), "--trainers", str(trainers)]
        command = [sys.executable, "-m", "jaxfleet", "launch", "--restarts", "0"]
        command += ["--servers", str(servers), "--trainers", str(trainers), *child]
        command += ["--cuts", str(cuts)]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=LONGEST_S
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return [s for entry in found for s in entry["seconds"]], found[0]["bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description="The benchmark pserver_step.")
    parser.add_argument("--quick", action="store_true", help="few steps: a look, not a verdict")
    parser.add_argument("--out", type=Path, help="be a trainer, and write the times there")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--cuts", type=int, default=1, help="groups that the sends leave in")
    arguments = parser.parse_args()
    steps = arguments.steps or (60 if arguments.quick else 800)
    if arguments.out is not None:
        train("pserver", arguments.trainers, steps, arguments.out, arguments.cuts)
        return
    rows = [_row("one process alone", train("single", 1, steps, None, 1), 0.0)]
    rows.append(_row("a trainer's segments alone", compute_only(2, steps), 0.0))
    bars = []
    for trainers, servers in ((2, 1), (1, 1), (2, 2)):
        seconds, moved = launched(servers, trainers, steps, arguments.cuts)
        what = f"{trainers} trainers + {servers} servers"
        rows.append(_row(what, seconds, moved))
        if (trainers, servers) == (2, 1):
            bars.append(Bar(f"{what}: ms", 1e3 * statistics.median(seconds), BAR_MS))
    print_table(HEADS, rows)
    print_bars("pserver_step", bars)


def _row(what: str, seconds: list[float], moved: float) -> list[str]:
    median = statistics.median(seconds)
    fastest = statistics.quantiles(seconds, n=10)[0]
    rate = f"{2 * moved / median / 1e9:.2f}" if moved else ""
    return [what, f"{1e3 * median:.2f}", f"{1e3 * fastest:.2f}", f"{moved / 1e6:.2f}", rate]


if __name__ == "__main__":
    main()

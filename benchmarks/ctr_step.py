"""Time of a step of a click model whose embedding is a table on servers.

    python benchmarks/ctr_step.py [--quick]

A row has 26 keys out of 10^6 (zipf 1.2), a table's row 16 elements, the layers are 400-400, all is
updated by SGD, and each of two trainers has 512 rows. Trainers and a server are processes on the
cores of one machine. The result is the median of a step's time over all trainers, after a warm-up
in which processes touch new memory and rows are created. The bars are those of the project's
design: 20 ms in sync, 17 ms in async and GEO. For comparison: one process that holds the table
itself, and keys out of 10^9 against keys out of 10^6 with the same number of live rows.
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

SLOTS, DIM, ROWS = 26, 16, 512
HIDDEN = (400, 400)
WARM_UP, BATCHES = 150, 64
BARS_MS = {"sync": 20.0, "async": 17.0, "geo": 17.0}
VOCABULARY_BAR = 1.15
LONGEST_S = 900.0
HEADS = ("", "step, ms", "fastest tenth, ms", "MB sent")

table = jf.embedding_table("ids", DIM, optimizer=jf.tables.Sgd(0.1))
tx = jf.distributed_optimizer(optax.sgd(0.1))


def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    def loss_of(params: Any) -> jax.Array:
        x = table(params["ids"], batch["keys"]).reshape(batch["keys"].shape[0], SLOTS * DIM)
        for layer in params["layers"][:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        logits = (x @ params["layers"][-1]["w"] + params["layers"][-1]["b"])[:, 0]
        loss: jax.Array = optax.sigmoid_binary_cross_entropy(logits, batch["y"]).mean()
        return loss

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def start() -> Any:
    sizes = (SLOTS * DIM, *HIDDEN, 1)
    keys = jax.random.split(jax.random.key(0), len(sizes) - 1)
    layers = [
        {"w": jax.random.normal(key, (m, n)) / np.sqrt(m), "b": jnp.zeros(n)}
        for key, m, n in zip(keys, sizes, sizes[1:], strict=False)
    ]
    params = {"ids": table.init(), "layers": layers}
    return {"params": params, "opt": tx.init(params)}


def batches(rows: int, vocabulary: int) -> list[dict[str, np.ndarray]]:
    """Returns batches; a larger vocabulary spreads the same key frequencies over other keys."""
    random = np.random.default_rng(0)
    found: list[dict[str, np.ndarray]] = []
    for _ in range(BATCHES):
        ranks = random.zipf(1.2, (rows, SLOTS))
        while (beyond := ranks > 10**6).any():
            ranks[beyond] = random.zipf(1.2, int(beyond.sum()))
        keys = ranks * (vocabulary // 10**6)
        clicked: np.ndarray = random.integers(0, 2, rows).astype(np.float32)
        found.append({"keys": keys, "y": clicked})
    return found


def train(options: argparse.Namespace) -> tuple[list[float], float]:
    """Trains in this process; returns the seconds of each step, and the bytes sent per step."""
    whole = ROWS * options.trainers
    data, state = batches(whole, options.vocabulary), start()
    strategy = jf.DistributedStrategy(mode=options.mode, communication=options.communication)
    step = jf.distribute(train_step, example=(state, data[0]), strategy=strategy)
    seconds, before = [], 0.0
    for number in range(options.steps + WARM_UP):
        if number == WARM_UP:
            before = _sent(step)
        started = time.perf_counter()
        state, metrics = step(state, data[number % BATCHES])
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UP:], (_sent(step) - before) / options.steps


def _sent(step: Any) -> float:
    return float(step.client.sent_bytes) if hasattr(step, "client") else 0.0


def launched(
    communication: str, trainers: int, steps: int, vocabulary: int = 10**6
) -> tuple[list[float], float]:
    """Trains in processes; returns the seconds of all trainers' steps, and the bytes per step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxfleet", "launch", "--restarts", "0"]
        command += ["--servers", "1", "--trainers", str(trainers), __file__, "--out", folder]
        command += ["--mode", "pserver", "--communication", communication]
        command += ["--steps", str(steps), "--trainers", str(trainers)]
        command += ["--vocabulary", str(vocabulary)]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=LONGEST_S
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return [s for entry in found for s in entry["seconds"]], found[0]["bytes"]


def main() -> None:
    options = _options()
    options.steps = options.steps or (60 if options.quick else 600)
    if options.out is not None:
        seconds, moved = train(options)
        name = options.out / f"{time.monotonic_ns()}.json"
        name.write_text(json.dumps({"seconds": seconds, "bytes": moved}))
        return
    alone = argparse.Namespace(**{**vars(options), "mode": "single", "trainers": 1})
    rows, bars = [_row("one process with the table", *train(alone))], []
    for communication, bar in BARS_MS.items():
        found = launched(communication, 2, options.steps)
        what = f"2 trainers + 1 server, {communication}"
        rows.append(_row(what, *found))
        bars.append(Bar(f"{what}: ms", 1e3 * statistics.median(found[0]), bar))
    medians = []
    for vocabulary in (10**6, 10**9):
        found = launched("sync", 2, options.steps, vocabulary)
        rows.append(_row(f"sync, keys out of {vocabulary:.0e}", *found))
        medians.append(statistics.median(found[0]))
    bars.append(Bar("keys out of 1e9 over 1e6", medians[1] / medians[0], VOCABULARY_BAR))
    print_table(HEADS, rows)
    print_bars("ctr_step", bars)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The benchmark ctr_step.")
    parser.add_argument("--quick", action="store_true", help="few steps: a look, not a verdict")
    parser.add_argument("--out", type=Path, help="be a trainer, and write the times there")
    parser.add_argument("--mode", default="pserver")
    parser.add_argument("--communication", default="sync")
    parser.add_argument("--vocabulary", type=int, default=10**6)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--trainers", type=int, default=2)
    return parser.parse_args()


def _row(what: str, seconds: list[float], moved: float) -> list[str]:
    median, fastest = statistics.median(seconds), statistics.quantiles(seconds, n=10)[0]
    return [what, f"{1e3 * median:.2f}", f"{1e3 * fastest:.2f}", f"{moved / 1e6:.2f}"]


if __name__ == "__main__":
    main()

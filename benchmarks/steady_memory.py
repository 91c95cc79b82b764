"""Memory of trainers and servers over a long run, every 1,000 steps.

    python benchmarks/steady_memory.py [--steps 17000] [--every 1000] [--width 128]

`jaxfleet launch` starts two trainers and one server, which keeps its own checkpoints by default;
the model is an MLP, 64-128-10, trained by Adam on 32 rows a trainer. Trainer 0 reads the resident
memory of all processes of the job from `/proc`. The result is the growth after the first 2,000
steps, when all is compiled and the replay logs are full.
"""

import argparse
import json
import os
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
from common import print_table

import jaxfleet as jf

ROWS, INPUTS, CLASSES = 32, 64, 10
WARM_UP = 2000  # steps
LONGEST_S = 3600.0


def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> jax.Array:
        hidden = jax.nn.relu(batch["x"] @ params["a"] + params["b"])
        logits = hidden @ params["c"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, {"loss": loss}


OPTIMIZER = jf.distributed_optimizer(optax.adam(1e-3))


def start(width: int) -> Any:
    rng = np.random.default_rng(0)
    params = {
        "a": jnp.asarray(rng.normal(size=(INPUTS, width)) / 8, jnp.float32),
        "b": jnp.zeros(width),
        "c": jnp.asarray(rng.normal(size=(width, CLASSES)) / 8, jnp.float32),
    }
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


def train(out: Path, steps: int, every: int, width: int) -> None:
    """Trains in this process; trainer 0 writes the memory of all processes, every `every` steps."""
    rng, state = np.random.default_rng(1), start(width)
    x = rng.normal(size=(2 * ROWS, INPUTS)).astype(np.float32)
    batch = {"x": x, "y": rng.integers(0, CLASSES, 2 * ROWS).astype(np.int32)}
    strategy = jf.DistributedStrategy(mode="pserver", min_block_size=1024)
    step = jf.distribute(train_step, example=(state, batch), strategy=strategy)
    began = time.perf_counter()
    with step, (out / f"trainer{jf.rank()}").open("w") as file:
        for number in range(1, steps + 1):
            state, _ = step(state, batch)
            if jf.rank() == 0 and number % every == 0:
                held = {"step": number, "s": time.perf_counter() - began, **of_job()}
                file.write(json.dumps(held) + "\n")
                file.flush()


def of_job() -> dict[str, float]:
    """Returns the resident MB of this process and its siblings, by role."""
    found: dict[str, float] = {}
    for folder in Path("/proc").iterdir():
        try:
            if not folder.name.isdecimal() or _parent(folder) != os.getppid():
                continue
            words = (folder / "cmdline").read_bytes().split(b"\0")
            fields = dict(
                line.split(":", 1) for line in (folder / "status").read_text().splitlines()
            )
        except OSError:  # it has ended
            continue
        what = "server" if b"serve" in words else "trainer"
        if "VmRSS" not in fields or (what == "trainer" and b"--out" not in words):
            continue
        count = sum(name.startswith(what) for name in found)
        found[f"{what} {count}"] = int(fields["VmRSS"].split()[0]) / 1000
    return found


def _parent(folder: Path) -> int:
    return int((folder / "stat").read_text().rpartition(")")[2].split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="The benchmark steady_memory.")
    parser.add_argument("--quick", action="store_true", help="few steps: a look, not a verdict")
    parser.add_argument("--out", type=Path, help="be a trainer, and write there")
    parser.add_argument("--steps", type=int, default=17_000)
    parser.add_argument("--every", type=int, default=1_000)
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()
    steps, every = (200, 50) if arguments.quick else (arguments.steps, arguments.every)
    if arguments.out is not None:
        train(arguments.out, arguments.steps, arguments.every, arguments.width)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxfleet", "launch", "--servers", "1", "--trainers", "2"]
        command += ["--checkpoint-dir", f"{folder}/own", __file__, "--out", folder]
        command += ["--steps", str(steps), "--every", str(every), "--width", str(arguments.width)]
        subprocess.run(command, check=True, timeout=LONGEST_S, stdout=sys.stderr)
        lines = (Path(folder) / "trainer0").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    names = [name for name in found[0] if name not in {"step", "s"}]
    rows = [[str(x["step"]), f"{x['s']:.0f}", *(f"{x[n]:.1f}" for n in names)] for x in found]
    print_table(("step", "s", *(f"{name}, MB" for name in names)), rows)
    late = [x for x in found if x["step"] >= WARM_UP] or found
    for name in names:
        sys.stdout.write(f"{name}: {late[-1][name] - late[0][name]:+.1f} MB\n")


if __name__ == "__main__":
    main()

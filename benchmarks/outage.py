"""Time from the SIGKILL of a parameter server to the next step of its trainers.

    python benchmarks/outage.py [--kills 10] [--servers 2] [--trainers 2] [--every 15]

`jaxfleet launch` runs a small job, whose trainers print a line after every step. Every `--every`
seconds this script kills one server, in turn, and takes the time until a step of every trainer has
ended that could not end without it. A step needs all servers, so the outage is in the longest gap
between the lines. Beside it stands the time that `python -c "import jax"` takes on this machine,
measured while the job runs and once it has ended.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from launched import LaunchedJob, ending_on_signals, import_s

INPUTS, HIDDEN, CLASSES, ROWS = 64, 256, 10, 64
PAUSE_S = 0.02
TRAINING_S = 3600.0


def train() -> None:
    """Trains in this process until its launch ends it."""
    import jax  # noqa: PLC0415  # only trainers need it
    import jax.numpy as jnp  # noqa: PLC0415
    import optax  # noqa: PLC0415

    import jaxfleet as jf  # noqa: PLC0415

    tx = jf.distributed_optimizer(optax.adam(1e-3))

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt = state

        def loss_fn(params: Any) -> jax.Array:
            hidden = jnp.tanh(batch["x"] @ params["a"] + params["b"])
            logits = hidden @ params["c"] + params["d"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    rng = np.random.default_rng(0)
    params = {
        "a": jnp.asarray(rng.normal(size=(INPUTS, HIDDEN)).astype(np.float32)),
        "b": jnp.zeros(HIDDEN),
        "c": jnp.asarray(rng.normal(size=(HIDDEN, CLASSES)).astype(np.float32)),
        "d": jnp.zeros(CLASSES),
    }
    state = (params, tx.init(params))
    x = rng.normal(size=(ROWS, INPUTS)).astype(np.float32)
    batch = {"x": x, "y": rng.integers(0, CLASSES, ROWS).astype(np.int32)}
    strategy = jf.DistributedStrategy(mode="pserver", min_block_size=1024)
    step = jf.distribute(train_step, example=(state, batch), strategy=strategy)
    number, ends = 0, time.monotonic() + TRAINING_S
    with step:
        while time.monotonic() < ends:
            state, metrics = step(state, batch)
            np.asarray(metrics["loss"])
            number += 1
            sys.stdout.write(f"step {number}\n")
            sys.stdout.flush()
            time.sleep(PAUSE_S)


def kill_servers(job: LaunchedJob, arguments: argparse.Namespace) -> list[float]:
    """Kills servers in turn, and returns the outages in seconds."""
    job.wait_steps(0.0, 5)
    outages = []
    for number in range(arguments.kills):
        time.sleep(arguments.every)
        server = number % arguments.servers
        killed = time.monotonic()
        starts = job.kill(("server", server))
        if starts is None:
            raise job.error(f"server {server} does not run")
        job.wait_starts(("server", server), starts)
        job.wait_steps(time.monotonic(), 20)
        outages.append(job.outage_s(killed))
        print(f"kill {number + 1}, server {server}: {outages[-1]:.2f} s", flush=True)
        if arguments.verbose:
            for at, line in job.lines:
                if at > killed:
                    print(f"    {at - killed:6.2f} {line}", flush=True)
    return outages


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The benchmark outage.")
    parser.add_argument("--quick", action="store_true", help="three kills")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between kills")
    parser.add_argument("--verbose", action="store_true", help="show the output after each kill")
    parser.add_argument("--train", action="store_true", help="be a trainer")
    arguments = parser.parse_args(words)
    if arguments.train:
        train()
        return
    if arguments.quick:
        arguments.kills = 3
    words = [f"--restarts={arguments.kills}", f"--servers={arguments.servers}"]
    words += [f"--trainers={arguments.trainers}", __file__, "--train"]
    with ending_on_signals(), LaunchedJob(words, trainers=arguments.trainers) as job:
        outages = kill_servers(job, arguments)
        beside = import_s()
    alone = import_s()
    median, worst = statistics.median(outages), max(outages)
    print(f"median {median:.2f} s, worst {worst:.2f} s, of {len(outages)} kills")
    print(f"python -c 'import jax': {beside:.2f} s beside the job, {alone:.2f} s alone")
    print(
        json.dumps(
            {
                "name": "outage",
                "kills": [round(each, 3) for each in outages],
                "import_jax_s": round(alone, 3),
                "import_jax_beside_job_s": round(beside, 3),
                "bars": [
                    {"what": "median outage, s", "value": round(median, 3), "bar": 2.0,
                     "ok": median <= 2.0},
                    {"what": "worst outage, s", "value": round(worst, 3), "bar": 5.0,
                     "ok": worst <= 5.0},
                ],
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""Trainers of the jobs that chaos.py disturbs: the script of every mode.

    jaxfleet launch --servers 3 --trainers 3 benchmarks/chaos_training.py --mode sync FOLDER

A trainer prints `step N` after each step. In sync mode the job ends after the step that the file
`FOLDER/stop` has, and each trainer writes its final state. In the other modes it ends soon after
there is such a file, and trainers write what they trained on, and trainer 0 what servers applied.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfleet as jf

INPUTS, HIDDEN, CLASSES, ROWS = 64, 256, 10, 66  # rows for three trainers, and for two
SAMPLES, LEASED = 1200, 10  # of the relaxed modes; samples of one trainer's step
DIM = 4
WAITS_S = 600.0
RELAXED: dict[str, dict[str, Any]] = {"async": {"merge": 4, "staleness": 12}, "geo": {"k_steps": 5}}

table = jf.embedding_table(
    "rows", DIM, initializer=jf.tables.Constant(0.0), optimizer=jf.tables.Sgd(1.0)
)
adam = jf.distributed_optimizer(optax.adam(1e-3))
sgd = jf.distributed_optimizer(optax.sgd(1.0))


def batch_of(number: int) -> dict[str, np.ndarray]:
    """Returns the batch of a step, whichever process asks."""
    rng = np.random.default_rng(number)
    x = rng.normal(size=(ROWS, INPUTS)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, CLASSES, ROWS).astype(np.int32)}


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    """Trains a small network with Adam, and a mean that trainers keep themselves."""
    params, opt, mean = state

    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        hidden = batch["x"] @ params["a"] + params["b"]
        logits = jnp.tanh(hidden - hidden.mean(0)) @ params["c"] + params["d"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean(), hidden.mean(0)

    (loss, now), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt = adam.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt, 0.9 * mean + 0.1 * now), {"loss": loss}


def start() -> Any:
    rng = np.random.default_rng(0)
    params = {
        "a": jnp.asarray(rng.normal(size=(INPUTS, HIDDEN)).astype(np.float32) / 8),
        "b": jnp.zeros(HIDDEN),
        "c": jnp.asarray(rng.normal(size=(HIDDEN, CLASSES)).astype(np.float32) / 16),
        "d": jnp.zeros(CLASSES),
    }
    return params, adam.init(params), jnp.zeros(HIDDEN)


def train_until(stop: Path, step: Any, state: Any, ended: Callable[[int], None]) -> Any:
    """Trains to the step in the file `stop`, which may appear late; returns the state.

    `ended` is called after each step.
    """
    state, number = step.resume(state)
    while not (stop.exists() and number >= int(stop.read_text())):
        number += 1
        state, metrics = step(state, batch_of(number))
        np.asarray(metrics["loss"])
        ended(number)
    return state


def train_sync(folder: Path, pause_s: float) -> None:
    """Trains to the step in the file `stop`, which may appear late."""
    state: Any = start()
    strategy = jf.DistributedStrategy(
        mode="pserver", min_block_size=1024, on_trainer_lost="wait", trainer_return_s=WAITS_S
    )
    step = jf.distribute(train_step, example=(state, batch_of(0)), strategy=strategy)
    with step:
        state = train_until(folder / "stop", step, state, lambda at: report(at, pause_s))
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(step.pull(state))]
    np.savez(folder / f"final-{jf.rank()}.npz", *leaves)


def count_step(state: Any, batch: Any) -> tuple[Any, Any]:
    """Adds 1 to the element and to the row of each sample of the batch."""

    def loss_fn(params: Any) -> jax.Array:
        counted = jax.nn.one_hot(batch["index"], SAMPLES) @ params["counts"]
        loss: jax.Array = -counted.sum() - table(params["rows"], batch["key"]).sum()
        return loss

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = sgd.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def train_relaxed(mode: Any, folder: Path, pause_s: float) -> None:
    """Trains on leased samples, each of which adds 1 where it belongs."""
    index = np.arange(SAMPLES, dtype=np.int32)
    keys = index.astype(np.int64) * 1_000_003
    rank, trainers = jf.rank(), jf.size()
    loader = jf.data.Loader(
        {"index": index, "key": keys}, LEASED * trainers, epochs=None, batch="local"
    )
    params = {"counts": jnp.zeros(SAMPLES), "rows": table.init()}
    state: Any = {"params": params, "opt": sgd.init(params)}
    strategy = jf.DistributedStrategy(
        mode="pserver", communication=mode, batch="local", min_block_size=64, **RELAXED[mode]
    )
    step = jf.distribute(count_step, example=(state, loader[0]), strategy=strategy)
    took, number = np.zeros(SAMPLES, np.int64), 0
    with step, step.batches(loader) as batches:
        for batch in batches:
            state, metrics = step(state, batch)
            np.asarray(metrics["loss"])
            took[batch["index"]] += 1
            number += 1
            report(number, pause_s)
            if _is_over(folder, rank, trainers):
                break
        found: dict[str, np.ndarray] = {"took": took}
        final = step.pull(state)
        if rank == 0:  # the others have sent all and left
            found["counts"] = np.asarray(final["params"]["counts"])
            found["rows"] = step.look_up("rows", keys)
        stats = step.stats()
        told = {"staleness": stats["trainer"]["staleness"], "data": stats["data"]}
    np.savez(folder / f"final-{rank}.npz", allow_pickle=False, **found)
    (folder / f"left-{rank}.json").write_text(json.dumps(told))


def _is_over(folder: Path, rank: int, trainers: int) -> bool:
    """Whether a trainer leaves: trainer 0 once all others have."""
    left = range(1, trainers) if rank == 0 else ()
    return (folder / "stop").exists() and all(
        (folder / f"left-{other}.json").exists() for other in left
    )


def report(number: int, pause_s: float) -> None:
    sys.stdout.write(f"step {number}\n")
    sys.stdout.flush()
    time.sleep(pause_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="A trainer of the benchmark chaos.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mode", choices=("sync", *RELAXED), required=True)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds after each step")
    arguments = parser.parse_args()
    if arguments.mode == "sync":
        train_sync(arguments.folder, arguments.pause)
    else:
        train_relaxed(arguments.mode, arguments.folder, arguments.pause)


if __name__ == "__main__":
    main()

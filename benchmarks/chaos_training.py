"""Trainers of the jobs that chaos.py disturbs: the script of every mode.

    jaxfleet launch --servers 3 --trainers 3 benchmarks/chaos_training.py --mode sync FOLDER

A trainer prints `step N` after each step. In sync mode the job ends after the step that the file
`FOLDER/stop` has, and each trainer writes its final state. In the other modes trainers leave once
there is such a file, and trainer 0 last of all: it goes on to the end of an epoch, and writes what
servers have applied. Each process writes how old its values were, as it goes along.
"""

import argparse
import json
import os
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
NOTED = 10  # steps after which a process writes its staleness again
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
    loader = jf.data.Loader(
        {"index": index, "key": keys}, LEASED * jf.size(), epochs=None, batch="local"
    )
    params = {"counts": jnp.zeros(SAMPLES), "rows": table.init()}
    state: Any = {"params": params, "opt": sgd.init(params)}
    strategy = jf.DistributedStrategy(
        mode="pserver",
        communication=mode,
        batch="local",
        min_block_size=64,
        on_trainer_lost="wait",
        trainer_return_s=WAITS_S,
        **RELAXED[mode],
    )
    step = jf.distribute(count_step, example=(state, loader[0]), strategy=strategy)
    with step:
        state, number = step.resume(state)
        with step.batches(loader, number) as batches:
            for batch in batches:
                state, metrics = step(state, batch)
                np.asarray(metrics["loss"])
                number += 1
                report(number, pause_s)
                if number % NOTED == 0:
                    note_staleness(folder, step)
                if may_leave(folder) and (jf.rank() > 0 or epochs_are_whole(step, state)):
                    break
        final = step.pull(state)
        note_staleness(folder, step)
        if jf.rank() == 0:  # the others have sent all and left
            counts, rows = np.asarray(final["params"]["counts"]), step.look_up("rows", keys)
            np.savez(folder / "final.npz", counts=counts, rows=rows)
            write(folder / "data.json", step.stats()["data"])
    write(folder / f"left-{jf.rank()}.json", number)


def may_leave(folder: Path) -> bool:
    """Whether a trainer leaves: trainer 0 once all others have."""
    left = range(1, jf.size()) if jf.rank() == 0 else ()
    return (folder / "stop").exists() and all(
        (folder / f"left-{other}.json").exists() for other in left
    )


def epochs_are_whole(step: Any, state: Any) -> bool:
    """Whether no epoch is trained on in part, so that all elements have the same count."""
    step.pull(state)  # which sends what is merged
    listed = step.stats()["data"]["epochs"]
    return all(each["never"] in {0, SAMPLES} for each in listed)


def note_staleness(folder: Path, step: Any) -> None:
    """Writes how old the values of this process's steps were at most, and how old they may be."""
    ages = step.stats()["trainer"]["staleness"]
    write(folder / f"staleness-{os.getpid()}.json", {n: ages[n] for n in ("bound", "max")})


def write(path: Path, told: Any) -> None:
    """Writes a file that is never there in part."""
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(told))
    written.rename(path)


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

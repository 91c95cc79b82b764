"""Trainers whose number changes while they lease samples: each sample adds 1 to its own element.

jaxfleet launch --servers 2 --trainers 1:2 tests/faults/leasing_training.py --out FOLDER
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfleet as jf

ROWS = 4  # of a trainer's batch
tx = jf.distributed_optimizer(optax.sgd(1.0))


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    counts, opt = state

    def loss_fn(counts: jax.Array) -> jax.Array:
        return -(jax.nn.one_hot(batch, len(counts)) @ counts).sum()

    loss, grads = jax.value_and_grad(loss_fn)(counts)
    updates, opt = tx.update(grads, opt, counts)
    return (optax.apply_updates(counts, updates), opt), loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--communication", default="async")
    parser.add_argument("--lost-after", type=float, default=3.0)
    args = parser.parse_args()
    source = np.arange(args.samples, dtype=np.int32)
    loader = jf.data.Loader(source, ROWS * jf.size(), epochs=1, seed=5, batch="local")
    counts = jnp.zeros(args.samples)
    state: Any = (counts, tx.init(counts))
    strategy = jf.DistributedStrategy(
        mode="pserver", communication=args.communication, batch="local", min_block_size=64,
        on_trainer_lost="continue", lost_after_s=args.lost_after, step_timeout_s=120.0,
    )  # fmt: skip
    step = jf.distribute(train_step, example=(state, loader[0]), strategy=strategy)
    with step:
        state, done = step.resume(state)
        for number, batch in enumerate(step.batches(loader, done), done + 1):
            state, loss = step(state, batch)
            np.asarray(loss)
            print(f"step {number}.", flush=True)  # noqa: T201
            time.sleep(args.pause)
        final, stats = np.asarray(step.pull(state)[0]), step.stats()
    np.savez(args.out / f"counts-{os.getpid()}.npz", counts=final)
    data, lag = stats["data"]["epochs"][0], stats["trainer"]["staleness"]
    print(f"data {data}, lag {lag['max']} of {lag['bound']}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

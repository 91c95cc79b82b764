"""Trains for eight steps over all ranks, saves every second one, and resumes from a checkpoint.

    python elastic.py FOLDER [RANK STEP]

RANK is killed before STEP, except in a restart. The final state goes to `final-RANK.npz`.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfleet as jf
from jaxfleet.env import read_restart

STEPS, ROWS = 8, 12
tx = jf.distributed_optimizer(optax.adam(0.05))


def train_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ params["w"])
        return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss


def batch_of(number: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number)
    x = random.normal(size=(ROWS, 6)).astype(np.float32)
    return {"x": x, "y": x.sum(1) + random.normal(size=ROWS).astype(np.float32)}


def main(folder: Path, *dying: int) -> None:
    place = jf.initialize()
    random = np.random.default_rng(7)
    params = {"w": random.normal(size=(6, 5)).astype(np.float32), "v": np.ones(5, np.float32)}
    state: Any = {"params": params, "opt_state": tx.init(params), "step": jnp.int32(0)}
    step = jf.distribute(train_step, (state, batch_of(0)))
    saved = folder / "saved"
    if saved.exists():
        state = step.restore(saved)
    sys.stdout.write(f"begins at {int(state['step'])} in start {read_restart()}\n")
    for number in range(int(state["step"]), STEPS):
        if dying == (place.rank, number) and not read_restart():
            os.kill(os.getpid(), signal.SIGKILL)
        state, loss = step(state, batch_of(number))
        if number % 2:
            step.save(saved, state)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    np.savez(folder / f"final-{place.rank}.npz", *leaves)
    sys.stdout.write(f"loss {float(loss):.6f} after {int(state['step'])} steps\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

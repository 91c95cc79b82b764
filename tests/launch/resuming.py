"""Trains for eight steps as ranks or trainers, and resumes from what the launch had them save.

    python resuming.py MODE FOLDER [NUMBER STEP]

Process NUMBER is killed before STEP, except in a restart. The final state goes to
`final-NUMBER.npz`.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfleet as jf
from jaxfleet.env import read_restart
from tests.launch.elastic import STEPS, batch_of, train_step, tx


def main(mode: str, folder: Path, *dying: int) -> None:
    if mode == "collective":
        jf.initialize()
    number = int(os.environ["PADDLE_TRAINER_ID"])
    random = np.random.default_rng(7)
    params = {"w": random.normal(size=(6, 5)).astype(np.float32), "v": np.ones(5, np.float32)}
    params = jax.tree.map(jnp.asarray, params)
    state: Any = {"params": params, "opt_state": tx.init(params), "step": jnp.int32(0)}
    step: Any = jf.distribute(train_step, (state, batch_of(0)), mode)
    with step:
        state, done = step.resume(state)
        sys.stdout.write(f"begins at {done} in start {read_restart()}\n")
        for at in range(done, STEPS):
            if dying == (number, at) and not read_restart():
                os.kill(os.getpid(), signal.SIGKILL)
            state, _ = step(state, batch_of(at))
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(step.pull(state))]
    np.savez(folder / f"final-{number}.npz", *leaves)
    sys.stdout.write(f"ends after {STEPS} steps\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))

"""Trains the small model with a table as one process of a job; saves the final rows."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

import jaxfleet as jf
from tests.sparse.models import OPTIMIZERS, VALUES, batch_of, sparse_job

STEPS = 6


def main() -> None:
    """Runs all steps in the given mode, and writes the final state to a file."""
    folder, mode, number = Path(sys.argv[1].removeprefix("--out=")), sys.argv[2], sys.argv[3]
    job = sparse_job(OPTIMIZERS["adagrad"][0])
    strategy = jf.DistributedStrategy(mode=mode, min_block_size=2)  # type: ignore[arg-type]
    step: Any = jf.distribute(job.train_step, (job.state, batch_of(0)), strategy)
    state, losses = job.state, []
    with step:
        for seed in range(STEPS):
            state, loss = step(state, batch_of(seed))
            losses.append(float(loss))
        rows = step.tables.look_up("users", np.arange(VALUES))
        w = np.asarray(step.pull(state)["params"]["w"])
        np.savez(folder / f"result-{number}.npz", rows=rows, w=w, losses=losses)


if __name__ == "__main__":
    main()

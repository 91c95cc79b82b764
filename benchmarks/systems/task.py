"""What every system trains, and how its processes report: NumPy alone, for Python 3.7 and later.

A network of 19,000 parameters with momentum. Beside it there are two arrays `counts`, whose element
n gets 1 in step n by the same update as the parameters, so the final state shows which steps were
lost or applied twice. Systems with two servers keep one on each, if they let a script choose.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

STEPS, SAVE_EVERY = 400, 25
INPUTS, HIDDEN, CLASSES, ROWS = 64, 256, 10, 64
RATE, MOMENTUM = 0.05, 0.9
COUNTS = ("counts_a", "counts_b")
PAUSE_S = 0.05  # after each step
FOLDER = "FAULTS_FOLDER"  # of the job's events and results
SAVES = "FAULTS_SAVES"  # of its checkpoints


def start() -> dict[str, np.ndarray]:
    """Returns the parameters before the first step."""
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=(INPUTS, HIDDEN)).astype(np.float32) / 8,
        "b": np.zeros(HIDDEN, np.float32),
        "c": rng.normal(size=(HIDDEN, CLASSES)).astype(np.float32) / 16,
        "d": np.zeros(CLASSES, np.float32),
        **{name: np.zeros(STEPS, np.float32) for name in COUNTS},
    }


def batch_of(number: int, rank: int = 0, size: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Returns a trainer's rows of a step's batch, f32[rows,64] and i64[rows]."""
    rng = np.random.default_rng(number)
    x = rng.normal(size=(ROWS, INPUTS)).astype(np.float32)
    y = rng.integers(0, CLASSES, ROWS).astype(np.int64)
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    return x[rows], y[rows]


def folder() -> Path:
    return Path(os.environ[FOLDER])


def saves() -> Path:
    return Path(os.environ[SAVES])


def report(member: str, what: str, number: int) -> None:
    """Appends an event of the process: `process` with its id; `restored`, `step`, `saved`."""
    line = f"{time.monotonic():.4f} {member} {what} {number}\n"
    descriptor = os.open(str(folder() / "events"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def finish(state: dict[str, np.ndarray]) -> None:
    """Writes the final state, in one piece."""
    written = folder() / "final.new.npz"
    np.savez(str(written), **state)  # type: ignore[arg-type]  # of allow_pickle
    written.replace(folder() / "final.npz")

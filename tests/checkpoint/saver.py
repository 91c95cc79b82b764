"""Saves repeatedly, in a process that a test kills or gives no room: `saver.py root how`."""

import json
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from jaxfleet.checkpoint import CheckpointSeries, Piece, save_arrays, write_part
from jaxfleet.errors import CheckpointError

ROWS = 1 << 13  # of 1024 floats: 32 MiB, slow enough to be killed in


def arrays(step: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    return {"w": np.full((rows, 1024), step, np.float32), "step": np.array(step)}


def say(*lines: object) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def forever(root: Path) -> None:
    series = CheckpointSeries(root)
    step = 1
    while True:
        save_arrays(series.path(step), arrays(step), step=step)
        say(step)
        series.prune()
        step += 1


def same_folder(root: Path) -> None:
    step = 1
    while True:
        save_arrays(root / "c", arrays(step), step=step)
        say(step)
        step += 1


def part(root: Path, number: int) -> None:
    """Writes one of three parts, and prints its receipt."""
    whole = arrays(7, rows=90)["w"] * np.arange(90, dtype=np.float32)[:, None]
    rows = Piece("w", whole[30 * number : 30 * number + 30], 30 * number, whole.shape)
    count = Piece.whole("step", np.array(7), shared=True)
    receipt = write_part(root, f"server {number}", [rows, count], step=7)
    say(json.dumps(receipt.to_plain()))


def without_room(root: Path) -> None:
    """Saves one that fits and one that does not, with files limited to 1 MiB."""
    series = CheckpointSeries(root)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    save_arrays(series.path(1), arrays(1, rows=16), step=1)
    try:
        save_arrays(series.path(2), arrays(2), step=2)
    except CheckpointError as error:
        say(error, error.errno, *error.__notes__)


HOW: dict[str, Callable[[Path], None]] = {
    "forever": forever,
    "same_folder": same_folder,
    "without_room": without_room,
    **{f"part {number}": partial(part, number=number) for number in range(3)},
}

if __name__ == "__main__":
    HOW[sys.argv[2]](Path(sys.argv[1]))

"""Saves tables in a process that dies; run by `light.py`, so that a hundred deaths take seconds."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxfleet.checkpoint import CheckpointSeries
from jaxfleet.checkpoint.array_store import DataWriter
from jaxfleet.checkpoint.tables import TableSeries
from jaxfleet.tables import RowBatch, TableSpec
from jaxfleet.tables.buckets import bucket_of
from tests.checkpoint.tables.kept import Kept, some_keys

KEYS = some_keys(90)
STEPS = 4
POINTS = 100


def history(store: Kept, step: int) -> None:
    """Modifies a store as a step does, so that every step leaves a different state."""
    if step == 1:
        store.touch(KEYS[:60], 1)
        store.wait(KEYS[60:], 1)
    store.remove(KEYS[3 * step : 3 * step + 2], step)
    store.touch(KEYS[60 + step : 62 + step], step)
    store.wait(KEYS[:step], step)


def after(step: int) -> Kept:
    store = Kept()
    for at in range(1, step + 1):
        history(store, at)
    return store


def run(folder: Path, said: Callable[[int], object]) -> None:
    """Saves everything, increments, which are compacted, more increments, and everything again."""
    store = Kept()
    saves = TableSeries(CheckpointSeries(folder, keep=1), [store], changes=1)
    for step in range(1, STEPS + 1):
        history(store, step)
        saves.save(step)
        said(step)
        if step == 2:
            saves.compact()


class Death:
    """Ends the process at one of the points at which a file is written, moved or removed.

    Unsynced data is then cut in two, as in a power failure.
    """

    def __init__(self, folder: Path, point: int) -> None:
        self.folder = folder
        self.point = point
        self.at = count()
        self.synced: set[int] = set()

    def spare(self) -> bool:
        """Counts a point; returns whether it is not the last one."""
        return next(self.at) != self.point

    def die(self) -> NoReturn:
        for path in self.folder.rglob("*"):
            if path.is_file() and (status := path.stat()).st_ino not in self.synced:
                os.truncate(path, status.st_size // 2)
        os._exit(9)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            if not self.spare():
                self.die()
            return function(*args, **kwargs)

        return instead

    def after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if not self.spare():
                self.die()
            return result

        return instead

    def fsync(self, descriptor: Any) -> None:
        """Replaces the function that waits for the disk."""
        if not self.spare():
            self.die()
        self.synced.add(os.fstat(descriptor).st_ino)

    def open(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Lets a file be cut in the middle of a write."""
        death = self

        class Torn(io.BufferedWriter):
            def write(self, data: Any) -> int:
                if not death.spare():
                    super().write(data[: len(data) // 2])
                    self.flush()
                    death.die()
                return super().write(data)

        def instead(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if mode == "xb":
                return Torn(io.FileIO(file, mode))
            return function(file, mode, *args, **kwargs)

        return instead

    def arm(self) -> None:
        os.fsync = self.fsync  # type: ignore[assignment]
        io.open = self.open(io.open)  # as called by pathlib
        for name in ("rename", "replace", "mkdir", "unlink", "rmdir"):
            setattr(os, name, self.before(getattr(os, name)))
        DataWriter.add = self.before(DataWriter.add)  # type: ignore[method-assign]
        DataWriter.close = self.after(DataWriter.close)  # type: ignore[method-assign]


def points(root: Path) -> None:
    """Runs once for each point, in a process that ends there; prints the saved step."""
    import tensorstore  # noqa: F401, PLC0415  # once, not in each of them

    assert "jax" not in sys.modules
    total = lives_to(root / "whole", -1)[1]
    for number in range(POINTS):
        saved, code = lives_to(root / str(number), number * total // POINTS)
        assert code == 9 or saved == STEPS  # it may have had fewer points than the first
        say(saved)
    say(total)


def lives_to(folder: Path, point: int) -> tuple[int, int]:
    """Returns the last saved step, and the exit status; for point -1, all points."""
    read, write = os.pipe()
    if not (child := os.fork()):
        death = Death(folder, point)
        death.arm()
        run(folder, lambda step: os.write(write, bytes([step])))
        os.write(write, next(death.at).to_bytes(4))
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    said = os.read(read, 100)
    os.close(read)
    if (code := os.waitstatus_to_exitcode(status)) == 0:
        return STEPS, code if point >= 0 else int.from_bytes(said[STEPS:])
    return len(said), code


def say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Flat:
    """Keeps many rows in arrays: saving them is slow enough to be killed in."""

    spec = TableSpec(name="flat", dim=16)

    def __init__(self, step: int) -> None:
        keys = some_keys(60_000)
        self.keys = keys[np.lexsort((keys, bucket_of(keys)))]
        self.touched = np.zeros(len(keys), np.int64)
        for at in range(1, step + 1):
            self.touch(at)

    def touch(self, step: int) -> None:
        self.touched[step % 10 :: 10] = step

    def batches(self, touched_since: int | None = None) -> Iterator[RowBatch]:
        there = self.touched > (-1 if touched_since is None else touched_since)
        keys, touched = self.keys[there], self.touched[there]
        rows = (keys[:, None] % 97 + touched[:, None] + np.arange(16)).astype(np.float32)
        yield RowBatch(keys, rows, counters={"touched": touched})

    def put(self, batch: RowBatch) -> None:
        raise NotImplementedError

    def forget_gone(self, until: int) -> None:
        """Keeps everything."""


def forever(folder: Path) -> None:
    store = Flat(0)
    saves = TableSeries(CheckpointSeries(folder, keep=1), [store], changes=2)
    for step in count(1):
        store.touch(step)
        saves.save(step)
        say(step)
        if step % 4 == 2:
            saves.compact()


if __name__ == "__main__":
    {"points": points, "forever": forever}[sys.argv[1]](Path(sys.argv[2]))

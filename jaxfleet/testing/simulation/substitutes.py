"""What replaces the machine during a run: clocks, random identifiers, disks, and two slow parts.

Patches hold for the process, so one simulation runs at a time. Tensorstore, whose files have random
names and whose threads nobody schedules, is replaced by one file a piece. Programs are read and cut
once: a run of the same job compiles and parses nothing.
"""

import contextlib
import functools
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from jaxfleet.checkpoint import reading, saving
from jaxfleet.checkpoint.array_store import DataError, sha256_of
from jaxfleet.checkpoint.manifest import DTYPES, PieceRecord
from jaxfleet.ir import printer
from jaxfleet.lower import partition
from jaxfleet.ps.client import heartbeat, trainer_executor
from jaxfleet.ps.server import checkpoints, program_loader, request_router, server_counters
from jaxfleet.runtime import leased_batches, pserver_job, trainer_step
from jaxfleet.testing.simulation.disk import Disk, patches

_BLOCK_S = (0.0, 0.0, 0.0, 0.02, 0.05)  # drawn durations of measured work


@contextmanager
def substituted(
    clock: Callable[[], float], draw: random.Random, find: Callable[[str], Disk | None]
) -> Iterator[None]:
    """Replaces clocks, identifiers, and the disks of the paths for which `find` returns one."""
    spent = 0.0

    def measured() -> float:
        nonlocal spent
        spent += draw.choice(_BLOCK_S)
        return clock() + spent

    replaced: list[tuple[Any, str, Any]] = [
        (time, "monotonic", clock),
        (time, "time", lambda: 1e9 + clock()),
        (time, "perf_counter", measured),
        (secrets, "token_hex", lambda count=8: draw.randbytes(count).hex()),
        (heartbeat, "resident_bytes", lambda: 0),
        (server_counters, "resident_bytes", lambda: 0),
        (saving, "DataWriter", PieceWriter),
        (reading, "read_blocks", read_pieces),
        (leased_batches, "ThreadPoolExecutor", SameThread),
        (trainer_executor, "segments", _segments),
        (trainer_step, "example_of", _example_of),
        (request_router, "load_sent_program", _load_sent_program),
        (request_router, "read_plan", _read_plan),
        (checkpoints, "print_program", _print_program),
    ]
    replaced += [(os, name, function) for name, function in patches(find).items()]
    with contextlib.ExitStack() as stack:
        for target, name, value in replaced:
            stack.enter_context(mock.patch.object(target, name, value))
        yield


class SameThread:
    """Reads batches at once, instead of threads that are not scheduled."""

    def __init__(self, *_: object, **__: object) -> None:
        """Has no threads."""

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        found: Future[Any] = Future()
        found.set_result(function(*args))
        return found

    def shutdown(self, **_: object) -> None:
        """Has nothing to end."""


class PieceWriter:
    """Writes each block of a piece to a file, instead of `DataWriter`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, number: int, record: PieceRecord, array: np.ndarray) -> tuple[str, ...]:
        if not record.nbytes:
            return ()
        sums = []
        for index, start in enumerate(range(0, record.rows, record.block_rows)):
            block = array[start : start + record.block_rows] if array.ndim else array
            (self._folder / f"{number}-{index}").write_bytes(np.ascontiguousarray(block).tobytes())
            sums.append(sha256_of(block))
        return tuple(sums)

    def close(self) -> None:
        """Does nothing: all is written."""

    def abort(self) -> None:
        """Does nothing: the caller removes the folder."""


def read_pieces(
    folder: Path, number: int, record: PieceRecord, start: int, stop: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Reads what `PieceWriter` wrote, instead of `read_blocks`."""
    dtype = DTYPES[record.dtype]
    for index in range(start // record.block_rows, -(-stop // record.block_rows)):
        first = index * record.block_rows
        rows = min(record.rows, first + record.block_rows) - first
        shape = (rows, *record.shape[1:]) if record.shape else ()
        data = (folder / f"{number}-{index}").read_bytes()
        if len(data) != int(np.prod(shape)) * dtype.itemsize:
            raise DataError(f"block {index} has {len(data)} bytes")
        block = np.frombuffer(data, dtype).reshape(shape)
        if reading_sum(block) != record.sha256[index]:
            raise DataError(f"rows from {first} on have another checksum than was written")
        yield first, block


def reading_sum(block: np.ndarray) -> str:
    """Returns the checksum of a block that was read."""
    return sha256_of(block)


def _memo(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that keeps its results, and the arguments, whose ids are in the keys."""
    kept: dict[Any, tuple[Any, Any]] = {}

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        found = key(*args, **more)
        if found not in kept:
            kept[found] = (args, function(*args, **more))
        return kept[found][1]

    return call


_segments = _memo(
    partition.segments,
    lambda program, sizes, *, cache: (id(program), tuple(sizes.items()), id(cache)),
)
_example_of = _memo(
    pserver_job.example_of,
    lambda captured, strategy, trainers: (id(captured), id(strategy), trainers),
)
_load_sent_program = _memo(
    program_loader.load_sent_program,
    lambda text, constants, cache: (
        text,
        tuple((tensor.name, tensor.array.tobytes()) for tensor in constants),
        id(cache),
    ),
)
_print_program = _memo(printer.print_program, id)
_read_plan = _memo(program_loader.read_plan, lambda program, cache: (str(program), id(cache)))

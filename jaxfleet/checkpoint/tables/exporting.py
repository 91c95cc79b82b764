"""Writes a table for other programs, saved or in use: as two numpy files, or as text."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from jaxfleet.checkpoint.files import staged_folder
from jaxfleet.checkpoint.tables.saved import SavedTable
from jaxfleet.checkpoint.writing import cannot_write
from jaxfleet.errors import CheckpointError
from jaxfleet.tables import RowBatch
from jaxfleet.tables.live import LiveTable

KEYS = "keys.npy"
ROWS = "rows.npy"
LINES = 1_000_000  # of one file of text


def export_arrays(table: SavedTable | LiveTable, folder: str | Path) -> int:
    """Writes `keys.npy`, int64[n] ascending, and `rows.npy`, float32[n, dim], into a new folder.

    All keys are in memory, and the rows of some buckets at a time.

    Returns:
        How many rows there are.

    Raises:
        CheckpointError: the folder is there already, the disk is full, or the table is damaged.
    """
    folder = _new(folder)
    try:
        with staged_folder(folder) as stage:
            return _write_arrays(table, stage)
    except OSError as error:
        raise _failed(table, folder, error) from error


def _write_arrays(table: SavedTable | LiveTable, stage: Path) -> int:
    found = [batch.keys for batch in table.batches()]
    keys = np.sort(np.concatenate([np.empty(0, np.int64), *found]))
    np.save(stage / KEYS, keys)
    shape = (len(keys), table.spec.dim)
    if not len(keys):
        np.save(stage / ROWS, np.empty(shape, np.float32))
        return 0
    rows = open_memmap(stage / ROWS, "w+", np.dtype(np.float32), shape)
    for batch in table.batches():
        rows[np.searchsorted(keys, batch.keys)] = batch.rows
    rows.flush()
    return len(keys)


def export_text(table: SavedTable | LiveTable, folder: str | Path, *, lines: int = LINES) -> int:
    """Writes `00000.tsv`, ... into a new folder: a key, a tab, and its row's numbers, a line each.

    Keys are by bucket, as they are saved. Numbers are the shortest that read back to the bit.

    Args:
        table: the table.
        folder: where the files go.
        lines: the most in a file.

    Returns:
        How many rows there are.

    Raises:
        CheckpointError: the folder is there already, the disk is full, or the table is damaged.
    """
    folder = _new(folder)
    try:
        with staged_folder(folder) as stage:
            return _write_text(table.batches(), stage, lines)
    except OSError as error:
        raise _failed(table, folder, error) from error


def _write_text(batches: Iterable[RowBatch], stage: Path, lines: int) -> int:
    written = 0
    for batch in batches:
        start = 0
        while start < len(batch.keys):
            stop = min(len(batch.keys), start + lines - written % lines)
            with (stage / f"{written // lines:05d}.tsv").open("a", encoding="ascii") as file:
                for key, row in zip(batch.keys[start:stop], batch.rows[start:stop], strict=True):
                    file.write(f"{key}\t{' '.join(map(str, row))}\n")
            written += stop - start
            start = stop
    return written


def _new(path: str | Path) -> Path:
    """Returns a folder that is not there yet, with all above it made."""
    folder = Path(path)
    if folder.exists():
        raise CheckpointError(f"{folder} is there already", hint="export into a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def _failed(table: SavedTable | LiveTable, folder: Path, error: OSError) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    return cannot_write(f"table `{table.spec.name}`", folder, error)

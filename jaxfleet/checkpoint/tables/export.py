"""Exports a table, saved or live, as two NumPy files or as text."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from jaxfleet.checkpoint.files import staged_folder
from jaxfleet.checkpoint.tables.delta_layers import SavedTable
from jaxfleet.checkpoint.writing import cannot_write
from jaxfleet.errors import CheckpointError
from jaxfleet.tables import RowBatch
from jaxfleet.tables.access import LiveTable

KEYS = "keys.npy"
ROWS = "rows.npy"
LINES = 1_000_000  # per text file


def exported(table: LiveTable, folder: str | Path, *, text: bool) -> int:
    """Writes a table into a new folder: `keys.npy` and `rows.npy`, or lines of text."""
    path = Path(folder).absolute()
    return export_text(table, path) if text else export_arrays(table, path)


def export_arrays(table: SavedTable | LiveTable, folder: str | Path) -> int:
    """Writes `keys.npy`, int64[n] ascending, and `rows.npy`, float32[n, dim], into a new folder.

    All keys are in memory, and the rows of a few buckets at a time.

    Returns:
        The number of rows.

    Raises:
        CheckpointError: the folder exists, the disk is full, or the table is damaged.
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
    """Writes `00000.tsv`, ... into a new folder: on each line a key, a tab and the row's numbers.

    Keys are in bucket order, as saved. Numbers are the shortest that read back bit for bit.

    Args:
        table: the table to export.
        folder: the folder for the files.
        lines: the maximum per file.

    Returns:
        The number of rows.

    Raises:
        CheckpointError: the folder exists, the disk is full, or the table is damaged.
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
    """Returns a folder that does not exist yet, and creates its parents."""
    folder = Path(path)
    if folder.exists():
        raise CheckpointError(f"{folder} is there already", hint="export into a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def _failed(table: SavedTable | LiveTable, folder: Path, error: OSError) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    return cannot_write(f"table `{table.spec.name}`", folder, error)

"""Writes one part of a checkpoint."""

import errno
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxfleet.checkpoint.array_store import DataWriter
from jaxfleet.checkpoint.checksummed_json import check_facts, write_sealed
from jaxfleet.checkpoint.files import (
    DATA,
    PART_MANIFEST,
    entries,
    is_ours,
    measure,
    part_folder,
    remove_empty,
    staged_folder,
    sync,
)
from jaxfleet.checkpoint.manifest import (
    PartReceipt,
    PartRecord,
    Piece,
    PieceRecord,
    Plain,
    record_of,
)
from jaxfleet.errors import CheckpointError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded")  # as reported by tensorstore


def write_part(
    folder: Path,
    part: str,
    pieces: Iterable[Piece],
    *,
    step: int,
    facts: Mapping[str, Plain] | None = None,
) -> PartReceipt:
    """Writes one process's part of a checkpoint, and returns the receipt for `commit`.

    Pieces are taken one at a time and up to 64 MiB are buffered, so a generator needs little
    memory. When this returns, all data is on disk. A checkpoint already in the folder stays intact
    until `commit`.

    Args:
        folder: the checkpoint's folder, the same for all processes; created if missing.
        part: the name of the process, such as `server 0`; unique within the job.
        pieces: rows of arrays.
        step: the step that the rows belong to.
        facts: plain data about this part, for its readers.

    Raises:
        CheckpointError: the disk is full or fails, a piece is invalid, or the folder contains other
            files. Nothing of the part remains.
    """
    final = folder / part_folder(part)
    known = check_facts(step, facts)
    try:
        _make(folder)
        return _write(final, PartRecord(part, step, known, 0, ()), pieces)
    except OSError as error:
        remove_empty(folder)
        if isinstance(error, CheckpointError):
            raise
        raise cannot_write(f"part '{part}' of step {step}", folder, error) from error


def _write(final: Path, record: PartRecord, pieces: Iterable[Piece]) -> PartReceipt:
    with staged_folder(final) as stage:
        data = stage / DATA
        data.mkdir()
        written = _write_pieces(data, record.part, pieces)
        record = replace(record, pieces=written, data_bytes=measure(data)[1])
        sha256 = write_sealed(stage / PART_MANIFEST, record.to_plain())
        files, size = measure(stage)
    return PartReceipt(record.part, final.name, files, size, sha256)


def _write_pieces(data: Path, part: str, pieces: Iterable[Piece]) -> tuple[PieceRecord, ...]:
    records: list[PieceRecord] = []
    writer = DataWriter(data)
    try:
        for number, piece in enumerate(pieces):
            record = _record(part, piece)
            blocks = writer.add(number, record, np.asarray(piece.array))
            records.append(replace(record, blocks=blocks))
        writer.close()
    except BaseException:
        writer.abort()
        raise
    return tuple(records)


def _record(part: str, piece: Piece) -> PieceRecord:
    try:
        return record_of(piece)
    except ValueError as error:
        hint = "a piece is rows of an array of numbers or truth values"
        raise CheckpointError(f"part '{part}' cannot be saved: {error}", hint=hint) from error


def _make(folder: Path) -> None:
    """Creates the checkpoint's folder, or checks that it is one.

    A save removes the leftovers of older saves, so it must not run in a folder with other files.
    """
    if foreign := [name for name in entries(folder) if not is_ours(name)]:
        what = f"{folder} holds {foreign[0]!r}, which is no part of a checkpoint"
        raise CheckpointError(what, hint="save into a folder of its own")
    folder.mkdir(parents=True, exist_ok=True)
    sync(folder.parent)


def cannot_write(what: str, folder: Path, error: OSError) -> CheckpointError:
    """Returns the error for a disk that is full or fails."""
    reason = error.strerror or str(error)
    try:
        room = f"{shutil.disk_usage(folder.parent).free / 1e6:.1f} MB are free there; "
    except OSError:
        room = ""
    hint = f"{room}what this save had written was removed, and older checkpoints are as they were"
    failed = CheckpointError(f"cannot write {what} to {folder}: {reason}", hint=hint)
    failed.errno = error.errno
    return failed


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed for lack of space, which may become available."""
    causes: BaseException | None = error
    while causes is not None:
        if getattr(causes, "errno", None) in _FULL or any(x in str(causes) for x in _FULL_TEXTS):
            return True
        causes = causes.__cause__
    return False

"""Saves checkpoints: each process writes its part, and one of them commits, manifest last."""

import errno
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from jaxfleet.checkpoint.array_store import DataWriter
from jaxfleet.checkpoint.files import (
    DATA,
    MANIFEST,
    PART_MANIFEST,
    check_facts,
    entries,
    is_ours,
    is_part,
    make_folder,
    measure,
    part_folder,
    read_sealed,
    remove,
    remove_empty,
    staged_folder,
    write_sealed,
)
from jaxfleet.checkpoint.manifest import (
    Link,
    Manifest,
    PartEntry,
    PartReceipt,
    PartRecord,
    Piece,
    PieceRecord,
    Plain,
    record_of,
)
from jaxfleet.checkpoint.reading import Part, catalog, open_part
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

    Examples:
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from jaxfleet.checkpoint import Piece, write_part
        >>> folder = Path("model")
        >>> receipt = write_part(folder, "server 0", [Piece("w", np.ones(2), 0, (4,))], step=7)
        >>> receipt.part, (folder / "checkpoint.json").exists()
        ('server 0', False)
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
        sha256 = write_sealed(stage / PART_MANIFEST, vars(record))
        files, size = measure(stage)
    return PartReceipt(record.part, final.name, files, size, sha256)


def _write_pieces(data: Path, part: str, pieces: Iterable[Piece]) -> tuple[PieceRecord, ...]:
    records: list[PieceRecord] = []
    writer = DataWriter(data)
    try:
        for number, piece in enumerate(pieces):
            record = _record(part, piece)
            blocks = writer.add(number, record, np.asarray(piece.array))
            records.append(replace(record, sha256=blocks))
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
        what = f"{folder} holds {foreign[0]!r}, which is not a part of a checkpoint"
        raise CheckpointError(what, hint="save into a folder of its own")
    make_folder(folder)


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
    """Whether a write failed for lack of space, which may become available.

    Examples:
        >>> import errno
        >>> from jaxfleet.checkpoint import is_disk_full
        >>> is_disk_full(OSError(errno.ENOSPC, "No space left on device"))
        True
        >>> is_disk_full(PermissionError(errno.EACCES, "Permission denied"))
        False
    """
    causes: BaseException | None = error
    while causes is not None:
        if getattr(causes, "errno", None) in _FULL or any(x in str(causes) for x in _FULL_TEXTS):
            return True
        causes = causes.__cause__
    return False


def commit(
    folder: Path,
    receipts: Sequence[PartReceipt],
    *,
    step: int,
    facts: Mapping[str, Plain] | None = None,
    after: Link | None = None,
) -> None:
    """Atomically makes written parts a checkpoint, which replaces an older one in the folder.

    Then removes the leftovers of the older checkpoint and of interrupted saves.

    Args:
        folder: the folder that the parts were written into.
        receipts: of all parts.
        step: the step that all parts were written at.
        facts: plain data, for readers of the checkpoint.
        after: the base, for a delta.

    Raises:
        CheckpointError: the parts do not cover every row of every array once, are of different
            steps, are damaged, or the disk is full. An older checkpoint is unchanged.

    Examples:
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from jaxfleet.checkpoint import Piece, commit, open_checkpoint, write_part
        >>> folder = Path("model")
        >>> rows = np.arange(4.0)
        >>> upper, lower = Piece("w", rows[:2], 0, (4,)), Piece("w", rows[2:], 2, (4,))
        >>> receipts = [
        ...     write_part(folder, "server 0", [upper], step=7),
        ...     write_part(folder, "server 1", [lower], step=7),
        ... ]
        >>> commit(folder, receipts, step=7)
        >>> open_checkpoint(folder).read("w", 1, 3)
        array([1., 2.])
    """
    known = check_facts(step, facts)
    parts = [_part(folder, receipt, step) for receipt in receipts]
    _check(folder, parts)
    listed = tuple(PartEntry(one.part, one.folder, one.sha256) for one in receipts)
    try:
        write_sealed(folder / MANIFEST, vars(Manifest(step, known, listed, after)))
    except OSError as error:
        raise cannot_write(f"the list of parts of step {step}", folder, error) from error
    _clean(folder, keep={MANIFEST, *(receipt.folder for receipt in receipts)})


def _part(folder: Path, receipt: PartReceipt, step: int) -> Part:
    if not is_part(receipt.folder):
        raise CheckpointError(f"{receipt.folder!r} is not the folder of part '{receipt.part}'")
    part = open_part(folder / receipt.folder, receipt.sha256)
    if part.record.part != receipt.part or part.record.step != step:
        what = f"part '{part.record.part}' of step {part.record.step} is not"
        hint = "all processes must save at the same step, into the same folder"
        raise CheckpointError(f"{what} part '{receipt.part}' of step {step}", hint=hint)
    return part


def _check(folder: Path, parts: list[Part]) -> None:
    try:
        catalog(part.record for part in parts)
    except ValueError as error:
        hint = "every row of every array must be in one part, or be shared"
        raise CheckpointError(f"no checkpoint in {folder}: {error}", hint=hint) from error


def discard(folder: Path, receipts: Iterable[PartReceipt]) -> None:
    """Removes parts that will not be committed because another process failed to write its own.

    Parts of the checkpoint in the folder stay: a commit may have failed at the very end, while
    waiting for the disk, after the new list of parts was in place. If that list cannot be read, all
    parts stay; the next commit into the folder removes those that it does not list.

    Examples:
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from jaxfleet.checkpoint import Piece, discard, write_part
        >>> folder = Path("model")
        >>> receipt = write_part(folder, "server 0", [Piece("w", np.ones(2), 0, (4,))], step=7)
        >>> discard(folder, [receipt])
        >>> folder.exists()
        False
    """
    try:
        listed = _listed(folder)
    except (CheckpointError, OSError):
        return
    for receipt in receipts:
        if is_part(receipt.folder) and receipt.folder not in listed:
            remove(folder / receipt.folder)
    remove_empty(folder)


def _listed(folder: Path) -> set[str]:
    if MANIFEST not in entries(folder):
        return set()
    manifest, _ = read_sealed(folder / MANIFEST, Manifest)
    return {entry.folder for entry in manifest.parts}


def _clean(folder: Path, keep: set[str]) -> None:
    for name in entries(folder):
        if is_ours(name) and name not in keep:
            remove(folder / name)


def save_arrays(
    folder: Path,
    arrays: Mapping[str, ArrayLike],
    *,
    step: int,
    facts: Mapping[str, Plain] | None = None,
) -> None:
    """Saves whole arrays as a checkpoint of one part; it replaces an existing one atomically.

    Raises:
        CheckpointError: the disk is full or fails, or a value cannot be saved.

    Examples:
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from jaxfleet.checkpoint import open_checkpoint, save_arrays
        >>> folder = Path("model")
        >>> save_arrays(folder, {"w": np.arange(3.0), "step": 7}, step=7)
        >>> open_checkpoint(folder).read("w")
        array([0., 1., 2.])
    """
    pieces = (Piece.whole(name, np.asarray(array)) for name, array in arrays.items())
    save_pieces(folder, pieces, step=step, facts=facts)


def save_pieces(
    folder: Path,
    pieces: Iterable[Piece],
    *,
    step: int,
    facts: Mapping[str, Plain] | None = None,
    part: str = "all",
    after: Link | None = None,
) -> PartReceipt:
    """Saves pieces as a checkpoint of one part, as `save_arrays` does for whole arrays.

    For a delta, `after` is its base.

    Raises:
        CheckpointError: the disk is full or fails, or a value cannot be saved.

    Examples:
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from jaxfleet.checkpoint import Piece, save_pieces
        >>> folder = Path("model")
        >>> save_pieces(folder, [Piece.whole("w", np.ones(3))], step=7).part
        'all'
    """
    receipt = write_part(folder, part, pieces, step=step)
    try:
        commit(folder, [receipt], step=step, facts=facts, after=after)
    except CheckpointError:
        discard(folder, [receipt])
        raise
    return receipt

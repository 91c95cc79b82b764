"""Commits a checkpoint: its manifest is written last."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from jaxfleet.checkpoint.checksummed_json import check_facts, read_sealed, write_sealed
from jaxfleet.checkpoint.files import MANIFEST, entries, is_ours, is_part, remove, remove_empty
from jaxfleet.checkpoint.manifest import Link, PartReceipt, Piece, Plain
from jaxfleet.checkpoint.reading import Part, catalog, open_part
from jaxfleet.checkpoint.typed_json import as_table
from jaxfleet.checkpoint.writing import cannot_write, write_part
from jaxfleet.errors import CheckpointError


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
    """
    known = check_facts(step, facts)
    parts = [_part(folder, receipt, step) for receipt in receipts]
    _check(folder, parts)
    listed = [
        {"part": receipt.part, "folder": receipt.folder, "sha256": receipt.sha256}
        for receipt in receipts
    ]
    content: dict[str, object] = {"step": step, "facts": known, "parts": listed}
    if after is not None:
        content["after"] = after.to_plain()
    try:
        write_sealed(folder / MANIFEST, content)
    except OSError as error:
        raise cannot_write(f"the list of parts of step {step}", folder, error) from error
    _clean(folder, keep={MANIFEST, *(receipt.folder for receipt in receipts)})


def _part(folder: Path, receipt: PartReceipt, step: int) -> Part:
    if not is_part(receipt.folder):
        raise CheckpointError(f"{receipt.folder!r} is no folder of part '{receipt.part}'")
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
    waiting for the disk, after the new list of parts was in place.
    """
    listed = _listed(folder)
    for receipt in receipts:
        if is_part(receipt.folder) and receipt.folder not in listed:
            remove(folder / receipt.folder)
    remove_empty(folder)


def _listed(folder: Path) -> set[object]:
    try:
        fields, _ = read_sealed(folder / MANIFEST)
        return {as_table("a part", item).text("folder") for item in fields.items("parts")}
    except (CheckpointError, ValueError):
        return set()


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
    """Saves whole arrays as a checkpoint of one part.

    Args:
        folder: the checkpoint's folder; an existing checkpoint is replaced atomically.
        arrays: array-likes, by name.
        step: the step that they belong to.
        facts: plain data, for readers of the checkpoint.

    Raises:
        CheckpointError: the disk is full or fails, or a value cannot be saved.
    """
    pieces = (Piece.whole(name, np.asarray(array)) for name, array in arrays.items())
    save_pieces(folder, pieces, step=step, facts=facts)


def save_pieces(
    folder: Path, pieces: Iterable[Piece], *, step: int, facts: Mapping[str, Plain] | None = None
) -> None:
    """Saves pieces as a checkpoint of one part, as `save_arrays` does for whole arrays.

    Args:
        folder: the checkpoint's folder.
        pieces: all pieces of the checkpoint.
        step: the step that they belong to.
        facts: plain data, for readers of the checkpoint.

    Raises:
        CheckpointError: the disk is full or fails, or a value cannot be saved.
    """
    receipt = write_part(folder, "all", pieces, step=step)
    try:
        commit(folder, [receipt], step=step, facts=facts)
    except CheckpointError:
        discard(folder, [receipt])
        raise

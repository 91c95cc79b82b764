"""Makes a checkpoint of parts: the last thing that is written is the list of them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jaxfleet.checkpoint.catalog import catalog
from jaxfleet.checkpoint.fields import as_table
from jaxfleet.checkpoint.files import entries, remove, remove_empty
from jaxfleet.checkpoint.layout import MANIFEST, is_ours, is_part
from jaxfleet.checkpoint.links import Link
from jaxfleet.checkpoint.pieces import PartReceipt, Plain
from jaxfleet.checkpoint.reading import Part, open_part
from jaxfleet.checkpoint.sealed import check_facts, read_sealed, write_sealed
from jaxfleet.checkpoint.writing import cannot_write
from jaxfleet.errors import CheckpointError


def commit(
    folder: Path,
    receipts: Sequence[PartReceipt],
    *,
    step: int,
    facts: Mapping[str, Plain] | None = None,
    after: Link | None = None,
) -> None:
    """Makes written parts a checkpoint, in one step; a checkpoint that was here is replaced by it.

    Then removes what the older one, and saves that did not end, left in the folder.

    Args:
        folder: the one that the parts were written into.
        receipts: of all parts.
        step: the step that all parts were written at.
        facts: plain data, for whoever reads it.
        after: the checkpoint without which this one, of changes, says nothing.

    Raises:
        CheckpointError: the parts do not hold every row of every array once, are of other steps,
            are damaged, or the disk is full. A checkpoint that was here is as it was.
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
    """Removes parts that will not be committed, because another process could not write its own.

    What the checkpoint in the folder is made of stays: a commit may have failed at the very end,
    in waiting for the disk, when the list of parts was the new one already.
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

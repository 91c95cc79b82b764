"""Reads a checkpoint: any rows of any array, however many parts they were written in."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from jaxfleet.checkpoint.catalog import Catalog, Entry, Place, bytes_of, catalog
from jaxfleet.checkpoint.data import read_blocks
from jaxfleet.checkpoint.fields import as_table
from jaxfleet.checkpoint.files import measure
from jaxfleet.checkpoint.layout import DATA, MANIFEST, PART_MANIFEST, is_part
from jaxfleet.checkpoint.links import Link
from jaxfleet.checkpoint.records import DTYPES, PartRecord, row_count
from jaxfleet.checkpoint.sealed import DAMAGED, read_sealed
from jaxfleet.errors import CheckpointError


@dataclass(frozen=True)
class Part:
    """One part: its folder and what its manifest says."""

    folder: Path
    record: PartRecord

    def blocks(self, number: int, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the blocks with some rows of a piece, and the first row of each.

        Raises:
            CheckpointError: they are damaged.
        """
        record = self.record.pieces[number]
        if not record.nbytes:
            return
        try:
            yield from read_blocks(self.folder / DATA, number, record, start, stop)
        except OSError as error:
            what = f"`{record.name}` cannot be read from {self.folder}: {error}"
            hint = DAMAGED if self.folder.is_dir() else "a newer save replaced it: open it again"
            raise CheckpointError(what, hint=hint) from error


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is open for reading.

    Attributes:
        folder: where it is.
        step: the step it was saved at.
        facts: what was said at the commit.
        parts: all parts.
        catalog: where every row of every array is.
        sha256: of its manifest.
        after: the checkpoint whose changes it holds, where it holds no more than changes of
            something; its series knows that one.
    """

    folder: Path
    step: int
    facts: Mapping[str, object]
    parts: tuple[Part, ...]
    catalog: Catalog
    sha256: str
    after: Link | None = None

    def names(self) -> tuple[str, ...]:
        """Returns the names of all arrays, sorted."""
        return tuple(self.catalog)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        return DTYPES[self._entry(name).dtype]

    def part_facts(self) -> dict[str, Mapping[str, object]]:
        """Returns what the writer of each part said."""
        return {part.record.part: part.record.facts for part in self.parts}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns rows of an array; all of them where no others are asked for.

        Reads no more than the blocks that these rows are in, and checks each.

        Raises:
            CheckpointError: there is no such array, it has no such rows, or they are damaged.
        """
        entry = self._entry(name)
        rows = row_count(entry.shape)
        last = rows if stop is None else stop
        if not 0 <= start <= last <= rows or (not entry.shape and (start, last) != (0, 1)):
            what = f"`{name}` has rows [0:{rows}], not [{start}:{last}]"
            raise CheckpointError(what, hint=f"its shape is {entry.shape} in {self.folder}")
        shape = (last - start, *entry.shape[1:]) if entry.shape else ()
        out = np.empty(shape, DTYPES[entry.dtype])
        for place in entry.places:
            self._read_piece(place, out, start)
        return out

    def _read_piece(self, place: Place, out: np.ndarray, start: int) -> None:
        """Fills what is of this piece in `out`, whose first row is `start` of the whole array."""
        record = place.record
        first = max(start, record.start)
        last = min(start + row_count(out.shape), record.stop)
        if first >= last:
            return
        begin, end = first - record.start, last - record.start
        for at, block in self.parts[place.part].blocks(place.number, begin, end):
            if not out.ndim:
                out[...] = block
                continue
            low, high = max(at, begin), min(at + len(block), end)
            shift = record.start - start
            out[low + shift : high + shift] = block[low - at : high - at]

    def verify(self) -> None:
        """Reads all there is, copies of shared arrays too, a block at a time.

        Raises:
            CheckpointError: something is damaged.
        """
        for part in self.parts:
            for number, record in enumerate(part.record.pieces):
                for _ in part.blocks(number, 0, record.rows):
                    pass

    def _entry(self, name: str) -> Entry:
        if (entry := self.catalog.get(name)) is not None:
            return entry
        near = difflib.get_close_matches(name, self.catalog, n=3)
        hint = f"did you mean {' or '.join(f'`{one}`' for one in near)}?" if near else None
        what = f"the checkpoint in {self.folder} has no `{name}`"
        raise CheckpointError(what, hint=hint or f"it has {len(self.catalog)} others: .names()")


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens a checkpoint, and sees that all its files are there and as long as they were.

    What is in the data is checked when it is read.

    Raises:
        CheckpointError: there is none, it is damaged, or a newer jaxfleet wrote it.
    """
    path = folder / MANIFEST
    if not path.is_file():
        what = f"there is no checkpoint in {folder}: it has no {MANIFEST}"
        hint = "a save that did not end leaves none; take an older one, or another folder"
        raise CheckpointError(what, hint=hint)
    fields, sha256 = read_sealed(path)
    try:
        step, facts = fields.count("step"), fields.table("facts")
        parts = tuple(read_part(folder, item) for item in fields.items("parts"))
        after = Link.from_plain(fields.plain)
        return Checkpoint(folder, step, facts, parts, _catalog(step, parts), sha256, after)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}", hint=DAMAGED) from error


def _catalog(step: int, parts: tuple[Part, ...]) -> Catalog:
    for part in parts:
        if part.record.step != step:
            what = f"part '{part.record.part}' is of step {part.record.step}"
            raise ValueError(f"{what}, and the checkpoint of step {step}")
    return MappingProxyType(catalog(part.record for part in parts))


def read_part(folder: Path, item: object) -> Part:
    """Returns a part that the manifest lists.

    Raises:
        ValueError: the list is wrong.
        CheckpointError: the part is missing, or not what the list says.
    """
    fields = as_table("a part", item)
    if not is_part(name := fields.text("folder")):
        raise ValueError(f"{name!r} is no folder of a part")
    part = open_part(folder / name, fields.digest("sha256"))
    if part.record.part != fields.text("part"):
        raise ValueError(f"{name} is part '{part.record.part}', and listed as another")
    return part


def open_part(folder: Path, sha256: str) -> Part:
    """Returns a part, once its manifest and the length of its data are known to be right.

    Nothing is allocated by what a manifest says of sizes before its data were found to have them.

    Raises:
        CheckpointError: they are not.
    """
    path = folder / PART_MANIFEST
    fields, found = read_sealed(path)
    if found != sha256:
        what = f"{path} has the checksum {found[:12]}, and was written with {sha256[:12]}"
        raise CheckpointError(what, hint=DAMAGED)
    try:
        record = PartRecord.from_fields(fields)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}", hint=DAMAGED) from error
    _check_length(folder / DATA, record)
    return Part(folder, record)


def _check_length(data: Path, record: PartRecord) -> None:
    try:
        _, size = measure(data)
    except OSError as error:
        raise CheckpointError(f"cannot read {data}: {error.strerror}", hint=DAMAGED) from error
    if size != record.data_bytes or size < bytes_of(record):
        least = max(record.data_bytes, bytes_of(record))
        what = f"the files in {data} have {size} bytes, and had {least} when they were written"
        raise CheckpointError(what, hint=DAMAGED)

"""Reads any rows of any array of a checkpoint, regardless of the division into parts."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from jaxfleet.checkpoint.array_store import read_blocks
from jaxfleet.checkpoint.files import (
    DAMAGED,
    DATA,
    MANIFEST,
    PART_MANIFEST,
    is_part,
    measure,
    read_sealed,
)
from jaxfleet.checkpoint.manifest import (
    DTYPES,
    Link,
    Manifest,
    PartEntry,
    PartRecord,
    PieceRecord,
    row_count,
)
from jaxfleet.errors import CheckpointError


@dataclass(frozen=True)
class Place:
    """The location of a piece: the index of its part, its index there, and its record."""

    part: int
    number: int
    record: PieceRecord


@dataclass(frozen=True)
class Entry:
    """An array of the checkpoint; its places are sorted by row and cover every row once."""

    dtype: str
    shape: tuple[int, ...]
    places: tuple[Place, ...]


Catalog: TypeAlias = Mapping[str, Entry]


def catalog(parts: Iterable[PartRecord]) -> dict[str, Entry]:
    """Returns all arrays of some parts; raises ValueError unless pieces cover each row once."""
    places: dict[str, list[tuple[str, Place]]] = {}
    seen: set[str] = set()
    for index, part in enumerate(parts):
        if part.part in seen:
            raise ValueError(f"part '{part.part}' is there twice")
        seen.add(part.part)
        for number, record in enumerate(part.pieces):
            found = (part.part, Place(index, number, record))
            places.setdefault(record.name, []).append(found)
    return {name: _entry(name, found) for name, found in sorted(places.items())}


def _entry(name: str, found: list[tuple[str, Place]]) -> Entry:
    first_part, first = found[0]
    for part, place in found[1:]:
        ours, theirs = _kind(first.record), _kind(place.record)
        if ours != theirs:
            raise ValueError(f"`{name}` is {ours} in part '{first_part}', {theirs} in '{part}'")
    return Entry(first.record.dtype, first.record.whole_shape, _in_order(name, found))


def _kind(record: PieceRecord) -> str:
    return f"{record.dtype}{list(record.whole_shape)}"


def _in_order(name: str, found: list[tuple[str, Place]]) -> tuple[Place, ...]:
    """Returns the non-empty pieces by row, with one for each set of shared copies."""
    kept: dict[tuple[int, int], tuple[str, Place]] = {}
    for part, place in found:
        record = place.record
        before = kept.setdefault((record.start, record.stop), (part, place))
        if before[1] is not place and record.rows:
            _check_copy(name, before, (part, place))
    ordered = [kept[rows] for rows in sorted(kept) if rows[0] < rows[1]]
    _check_cover(name, row_count(found[0][1].record.whole_shape), ordered)
    return tuple(place for _, place in ordered)


def _check_copy(name: str, one: tuple[str, Place], other: tuple[str, Place]) -> None:
    where = f"rows [{one[1].record.start}:{one[1].record.stop}] of `{name}`"
    both = f"part '{one[0]}' and part '{other[0]}'"
    if not (one[1].record.shared and other[1].record.shared):
        raise ValueError(f"{where} are in {both}, and not shared")
    if one[1].record.sha256 != other[1].record.sha256:
        raise ValueError(f"{where} are shared by {both}, with other bytes")


def _check_cover(name: str, rows: int, ordered: list[tuple[str, Place]]) -> None:
    for (part, one), (other_part, other) in pairwise(ordered):
        if one.record.stop > other.record.start:
            what = f"rows [{other.record.start}:{min(one.record.stop, other.record.stop)}]"
            raise ValueError(f"{what} of `{name}` are in part '{part}' and part '{other_part}'")
    ends = [0, *(place.record.stop for _, place in ordered)]
    starts = [*(place.record.start for _, place in ordered), rows]
    for end, start in zip(ends, starts, strict=True):
        if end < start:
            raise ValueError(f"rows [{end}:{start}] of `{name}` are in no part")


def bytes_of(part: PartRecord) -> int:
    """Returns the minimum size of a part's data."""
    return sum(piece.nbytes for piece in part.pieces)


@dataclass(frozen=True)
class Part:
    """A part: its folder and its manifest."""

    folder: Path
    record: PartRecord

    def blocks(self, number: int, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the blocks that contain rows of a piece, each with its first row."""
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
        folder: its folder.
        step: the step it was saved at.
        facts: the facts given at the commit.
        parts: all parts.
        catalog: the location of every row of every array.
        sha256: of its manifest.
        after: for a delta, its base, which is in the same series.

    Examples:
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from jaxfleet.checkpoint import open_checkpoint, save_arrays
        >>> folder = Path("model")
        >>> save_arrays(folder, {"w": np.ones((4, 2))}, step=7, facts={"model": "mlp"})
        >>> found = open_checkpoint(folder)
        >>> found.step, found.names(), found.shape("w"), found.facts["model"]
        (7, ('w',), (4, 2), 'mlp')
        >>> found.read("w", 3)
        array([[1., 1.]])
    """

    folder: Path
    step: int
    facts: Mapping[str, object]
    parts: tuple[Part, ...]
    catalog: Catalog
    sha256: str
    after: Link | None = None

    def names(self) -> tuple[str, ...]:
        return tuple(self.catalog)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        return DTYPES[self._entry(name).dtype]

    def part_facts(self) -> dict[str, Mapping[str, object]]:
        return {part.record.part: part.record.facts for part in self.parts}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns rows of an array, all of them by default.

        Reads and checks only the blocks that contain these rows.

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
        """Copies a piece's rows into `out`, whose first row is row `start` of the whole array."""
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
        """Reads all data, including copies of shared arrays, a block at a time.

        Raises:
            CheckpointError: some data is damaged.
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
    """Opens a checkpoint, and checks that all its files exist with the recorded sizes.

    Data is checked when it is read.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or a newer jaxfleet wrote it.

    Examples:
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from jaxfleet.checkpoint import open_checkpoint, save_arrays
        >>> folder = Path("model")
        >>> save_arrays(folder, {"w": np.ones(2)}, step=7)
        >>> open_checkpoint(folder).step
        7
    """
    path = folder / MANIFEST
    if not path.is_file():
        what = f"there is no checkpoint in {folder}: it has no {MANIFEST}"
        hint = "a save that did not end leaves none; take an older one, or another folder"
        raise CheckpointError(what, hint=hint)
    found, sha256 = read_sealed(path, Manifest)
    try:
        parts = tuple(read_part(folder, entry) for entry in found.parts)
        arrays = _catalog(found.step, parts)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}", hint=DAMAGED) from error
    return Checkpoint(folder, found.step, found.facts, parts, arrays, sha256, found.after)


def _catalog(step: int, parts: tuple[Part, ...]) -> Catalog:
    for part in parts:
        if part.record.step != step:
            what = f"part '{part.record.part}' is of step {part.record.step}"
            raise ValueError(f"{what}, and the checkpoint of step {step}")
    return MappingProxyType(catalog(part.record for part in parts))


def read_part(folder: Path, entry: PartEntry) -> Part:
    """Returns a part that the manifest lists; raises ValueError if it is another."""
    if not is_part(entry.folder):
        raise ValueError(f"{entry.folder!r} is not the folder of a part")
    part = open_part(folder / entry.folder, entry.sha256)
    if part.record.part != entry.part:
        raise ValueError(f"{entry.folder} is part '{part.record.part}', and listed as another")
    return part


def open_part(folder: Path, sha256: str) -> Part:
    """Returns a part after checking its manifest and the size of its data.

    Sizes in the manifest are compared with the data before anything of that size is allocated.
    """
    path = folder / PART_MANIFEST
    record, found = read_sealed(path, PartRecord)
    if found != sha256:
        what = f"{path} has the checksum {found[:12]}, and was written with {sha256[:12]}"
        raise CheckpointError(what, hint=DAMAGED)
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

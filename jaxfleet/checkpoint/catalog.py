"""Puts the parts of a checkpoint together: which rows of which array are where."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from jaxfleet.checkpoint.records import PartRecord, PieceRecord, row_count


@dataclass(frozen=True)
class Place:
    """Where a piece is.

    Attributes:
        part: the part's number.
        number: the piece's number in the part.
        record: what the manifest says of it.
    """

    part: int
    number: int
    record: PieceRecord


@dataclass(frozen=True)
class Entry:
    """One array.

    Attributes:
        dtype: a key of `records.DTYPES`.
        shape: the whole array's.
        places: its pieces in the order of their rows, which cover every row once.
    """

    dtype: str
    shape: tuple[int, ...]
    places: tuple[Place, ...]


Catalog: TypeAlias = Mapping[str, Entry]


def catalog(parts: Iterable[PartRecord]) -> dict[str, Entry]:
    """Returns all arrays of some parts.

    Raises:
        ValueError: pieces of an array leave a gap, overlap, or contradict each other.
    """
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
    """Returns the pieces that have rows, by rows, with one for each set of shared copies."""
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
    if one[1].record.blocks != other[1].record.blocks:
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
    """Returns how many bytes the data of a part must have at least."""
    return sum(piece.nbytes for piece in part.pieces)

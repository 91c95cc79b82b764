"""Manifests: records of pieces, of parts, and of the checkpoint that a delta builds on."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self, TypeAlias

import ml_dtypes
import numpy as np

from jaxfleet.checkpoint.typed_json import Fields, as_table, check_shape
from jaxfleet.errors import CheckpointError

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"


@dataclass(frozen=True)
class Piece:
    """Rows of an array, along its first axis.

    Attributes:
        name: the array's name, such as `state/0/w1`. Any text; not used as a file name.
        array: the rows; a scalar counts as one row.
        start: the index of the first row in the whole array.
        whole_shape: the shape of the whole array.
        shared: other parts contain the same rows, bit for bit.
    """

    name: str
    array: np.ndarray
    start: int
    whole_shape: tuple[int, ...]
    shared: bool = False

    @classmethod
    def whole(cls, name: str, array: np.ndarray, *, shared: bool = False) -> Self:
        return cls(name, array, 0, array.shape, shared)


@dataclass(frozen=True)
class PartReceipt:
    """Information about a written part for `commit`.

    Attributes:
        part: the part's name, such as `server 0`.
        folder: the part's folder within the checkpoint's.
        files: the number of files.
        bytes: their total size.
        sha256: of the part's manifest, which contains that of every block of rows.
    """

    part: str
    folder: str
    files: int
    bytes: int
    sha256: str

    def to_plain(self) -> dict[str, Plain]:
        """Returns the receipt as plain data, for a message."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, object]) -> Self:
        """Creates a receipt from received plain data.

        Raises:
            CheckpointError: a field is missing or has another type.
        """
        fields = Fields(plain)
        try:
            return cls(
                part=fields.text("part"),
                folder=fields.text("folder"),
                files=fields.count("files"),
                bytes=fields.count("bytes"),
                sha256=fields.digest("sha256"),
            )
        except ValueError as error:
            hint = "both processes must run the same jaxfleet"
            raise CheckpointError(f"this is no receipt of a part: {error}", hint=hint) from error


@dataclass(frozen=True)
class Link:
    """A reference to another checkpoint of the same series.

    The sha256 is that of its manifest, which contains those of its parts, and so identifies it.
    """

    step: int
    sha256: str

    def to_plain(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, object]) -> Self | None:
        """Returns the link under `after` in a manifest, None if there is no such field."""
        if plain.get("after") is None:
            return None
        fields = as_table("`after`", plain["after"])
        return cls(fields.count("step"), fields.digest("sha256"))


_NAMES = """
    bool int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float8_e4m3fn float8_e5m2
    float16 bfloat16 float32 float64 complex64 complex128
"""
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in _NAMES.split()}
BLOCK_BYTES = 4 << 20  # of whole rows; the smallest unit of reading and checking


@dataclass(frozen=True)
class PieceRecord:
    """The manifest's record of a piece; raises ValueError if the fields contradict each other.

    Attributes:
        name: the array's name.
        dtype: a key of `DTYPES`.
        shape: of the piece.
        start: its first row in the whole array.
        whole_shape: of the whole array.
        shared: other parts contain the same rows.
        block_rows: rows per block; the last may have fewer.
        blocks: the sha256 of each block's bytes, little-endian in C order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    whole_shape: tuple[int, ...]
    shared: bool
    block_rows: int
    blocks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"`{self.name}` has the dtype {self.dtype}, which cannot be saved")
        check_shape("shape", self.shape)
        check_shape("whole_shape", self.whole_shape)
        if len(self.shape) != len(self.whole_shape) or self.shape[1:] != self.whole_shape[1:]:
            raise ValueError(f"`{self.name}`: {self.shape} are no rows of {self.whole_shape}")
        rows = row_count(self.whole_shape)
        if not 0 <= self.start <= self.stop <= rows:
            raise ValueError(
                f"`{self.name}` has {rows} rows, and the piece is [{self.start}:{self.stop}]"
            )
        if self.block_rows < 1:
            raise ValueError(f"`{self.name}` has blocks without rows")

    @property
    def rows(self) -> int:
        return row_count(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.rows

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def block_count(self) -> int:
        """The number of stored blocks; 0 for an array without elements."""
        return -(-self.rows // self.block_rows) if self.nbytes else 0

    def to_plain(self) -> dict[str, object]:
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "start": self.start,
            "whole_shape": list(self.whole_shape),
            "shared": self.shared,
            "block_rows": self.block_rows,
            "sha256": list(self.blocks),
        }

    @classmethod
    def from_plain(cls, plain: object) -> Self:
        fields = as_table("a piece", plain)
        record = cls(
            name=fields.text("name"),
            dtype=fields.text("dtype"),
            shape=fields.shape("shape"),
            start=fields.count("start"),
            whole_shape=fields.shape("whole_shape"),
            shared=fields.flag("shared"),
            block_rows=fields.count("block_rows"),
            blocks=fields.digests("sha256"),
        )
        if len(record.blocks) != record.block_count:
            what = f"`{record.name}` has {len(record.blocks)} checksums"
            raise ValueError(f"{what} for {record.block_count} blocks")
        return record


@dataclass(frozen=True)
class PartRecord:
    """The manifest of a part; its pieces are in the order of their indices in the data."""

    part: str
    step: int
    facts: Mapping[str, object]
    data_bytes: int
    pieces: tuple[PieceRecord, ...]

    def to_plain(self) -> dict[str, object]:
        return {
            "part": self.part,
            "step": self.step,
            "facts": dict(self.facts),
            "data_bytes": self.data_bytes,
            "pieces": [piece.to_plain() for piece in self.pieces],
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(
            part=fields.text("part"),
            step=fields.count("step"),
            facts=fields.table("facts"),
            data_bytes=fields.count("data_bytes"),
            pieces=tuple(PieceRecord.from_plain(item) for item in fields.items("pieces")),
        )


def row_count(shape: tuple[int, ...]) -> int:
    """Returns the number of rows of an array: 1 for a scalar."""
    return shape[0] if shape else 1


def record_of(piece: Piece) -> PieceRecord:
    """Returns the record of a piece, without its checksums yet; raises ValueError if invalid."""
    array = np.asarray(piece.array)
    rows = row_count(array.shape)
    row_bytes = max(1, array.nbytes // max(1, rows))
    return PieceRecord(
        name=piece.name,
        dtype=array.dtype.name,
        shape=array.shape,
        start=piece.start,
        whole_shape=tuple(piece.whole_shape),
        shared=piece.shared,
        block_rows=max(1, min(rows, BLOCK_BYTES // row_bytes)),
    )

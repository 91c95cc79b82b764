"""What the manifests say: of a piece, of a part."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import ml_dtypes
import numpy as np

from jaxfleet.checkpoint.fields import Fields, as_table, check_shape
from jaxfleet.checkpoint.pieces import Piece

_NAMES = """
    bool int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float8_e4m3fn float8_e5m2
    float16 bfloat16 float32 float64 complex64 complex128
"""
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in _NAMES.split()}
BLOCK_BYTES = 4 << 20  # of whole rows; what is read and checked at least


@dataclass(frozen=True)
class PieceRecord:
    """One piece in a part.

    Attributes:
        name: the array's.
        dtype: a key of `DTYPES`.
        shape: the piece's.
        start: its first row in the whole array.
        whole_shape: the whole array's.
        shared: other parts hold the same.
        block_rows: how many rows a block has; the last may have fewer.
        blocks: the sha256 of each block's bytes, little-endian in C order.

    Raises:
        ValueError: the fields contradict each other.
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
        """How many blocks are stored: none of an array without elements."""
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
    """One part.

    Attributes:
        part: its name.
        step: the step that it was written at.
        facts: what its writer said.
        data_bytes: how long its data files are, together.
        pieces: in the order of their numbers in the data.
    """

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
        """Makes a record of what a manifest says.

        Raises:
            ValueError: it says what cannot be.
        """
        return cls(
            part=fields.text("part"),
            step=fields.count("step"),
            facts=fields.table("facts"),
            data_bytes=fields.count("data_bytes"),
            pieces=tuple(PieceRecord.from_plain(item) for item in fields.items("pieces")),
        )


def row_count(shape: tuple[int, ...]) -> int:
    """Returns how many rows an array has: a scalar is one."""
    return shape[0] if shape else 1


def record_of(piece: Piece) -> PieceRecord:
    """Returns the record of a piece, without its checksums yet.

    Raises:
        ValueError: it is no piece of an array that can be saved.
    """
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

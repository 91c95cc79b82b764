"""Records of manifests: of pieces, of parts, of receipts and of a checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Self, TypeAlias

import ml_dtypes
import numpy as np
from msgspec import Meta, ValidationError, convert

from jaxfleet.errors import CheckpointError

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

MAX_RANK = 32  # tensorstore's limit
MAX_SIZE = 2**62  # tensorstore's limit; numpy can still multiply it by 1, no more

Count: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_SIZE)]
Digest: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


def check_shape(key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape; raises ValueError for too many axes or elements, or a negative size."""
    if len(shape) > MAX_RANK:
        raise ValueError(f"`{key}` has {len(shape)} axes, more than {MAX_RANK}")
    elements = 1
    for size in shape:
        if not 0 <= size < MAX_SIZE:
            raise ValueError(f"`{key}` has a size of {size}")
        elements *= max(1, size)
        if elements >= MAX_SIZE // 16:  # 16 bytes is the largest element
            raise ValueError(f"`{key}` is larger than any array")
    return shape


@dataclass(frozen=True)
class Piece:
    """Rows of an array, along its first axis.

    Attributes:
        name: the array's name, such as `state/0/w1`. Any text; not used as a file name.
        array: the rows; a scalar counts as one row.
        start: the index of the first row in the whole array.
        whole_shape: the shape of the whole array.
        shared: other parts contain the same rows, bit for bit.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet.checkpoint import Piece
        >>> w = np.arange(12.0).reshape(6, 2)
        >>> lower = Piece("w", w[4:], start=4, whole_shape=w.shape)
        >>> lower.array.shape
        (2, 2)
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

    Examples:
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from jaxfleet.checkpoint import PartReceipt, Piece, write_part
        >>> folder = Path("model")
        >>> receipt = write_part(folder, "server 0", [Piece.whole("w", np.ones(2))], step=7)
        >>> PartReceipt.from_plain(receipt.to_plain()) == receipt
        True
    """

    part: str
    folder: str
    files: Count
    bytes: Count
    sha256: Digest

    def to_plain(self) -> dict[str, Plain]:
        """Returns the receipt as plain data, for a message."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, object]) -> Self:
        """Creates a receipt from received plain data.

        Raises:
            CheckpointError: a field is missing or has another type.
        """
        try:
            return convert(plain, cls)
        except ValidationError as error:
            hint = "both processes must run the same jaxfleet"
            raise CheckpointError(f"this is not a receipt of a part: {error}", hint=hint) from error


@dataclass(frozen=True)
class Link:
    """A reference to another checkpoint of the same series.

    The sha256 is that of its manifest, which contains those of its parts, and so identifies it.
    """

    step: Count
    sha256: Digest


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
        sha256: of each block's bytes, little-endian in C order.
    """

    name: str
    dtype: str
    shape: tuple[Count, ...]
    start: Count
    whole_shape: tuple[Count, ...]
    shared: bool
    block_rows: Count
    sha256: tuple[Digest, ...] = ()

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


@dataclass(frozen=True)
class PartRecord:
    """The manifest of a part; its pieces are in the order of their indices in the data."""

    part: str
    step: Count
    facts: Mapping[str, object]
    data_bytes: Count
    pieces: tuple[PieceRecord, ...]

    def __post_init__(self) -> None:
        for piece in self.pieces:
            if len(piece.sha256) != piece.block_count:
                what = f"`{piece.name}` has {len(piece.sha256)} checksums"
                raise ValueError(f"{what} for {piece.block_count} blocks")


@dataclass(frozen=True)
class PartEntry:
    """A part in the manifest of a checkpoint; the sha256 is that of the part's own manifest."""

    part: str
    folder: str
    sha256: Digest


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint; `after` is the base of a delta."""

    step: Count
    facts: Mapping[str, object]
    parts: tuple[PartEntry, ...]
    after: Link | None = None


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

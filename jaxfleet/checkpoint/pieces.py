"""What a process hands in, rows of an array, and what it gets back for them, a receipt."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self, TypeAlias

import numpy as np

from jaxfleet.checkpoint.fields import Fields
from jaxfleet.errors import CheckpointError

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"


@dataclass(frozen=True)
class Piece:
    """Rows of an array, along its first axis.

    Attributes:
        name: the array's: `state/0/w1`. Any text; no file is named by it.
        array: the rows; a scalar counts as one row.
        start: the first of them in the whole array.
        whole_shape: the shape of the whole array.
        shared: other parts hold the same rows, with equal bytes.
    """

    name: str
    array: np.ndarray
    start: int
    whole_shape: tuple[int, ...]
    shared: bool = False

    @classmethod
    def whole(cls, name: str, array: np.ndarray, *, shared: bool = False) -> Self:
        """Makes a piece that is the whole array."""
        return cls(name, array, 0, array.shape, shared)


@dataclass(frozen=True)
class PartReceipt:
    """What `commit` must know of a part that is written.

    Attributes:
        part: the part's name: `server 0`.
        folder: where it is, in the checkpoint's folder.
        files: how many files it has.
        bytes: how many bytes are in them.
        sha256: of its manifest, which has that of every block of rows.
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
        """Makes a receipt from plain data that somebody sent.

        Raises:
            CheckpointError: a field is missing, or is of another type.
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

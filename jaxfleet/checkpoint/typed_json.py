"""Typed reading of plain data from JSON files and message bodies."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_RANK = 32  # tensorstore's limit
MAX_SIZE = 2**62  # tensorstore's limit; numpy can still multiply it by 1, no more
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Fields:
    """Typed access to a mapping. Every method raises a ValueError that names the field."""

    plain: Mapping[str, object]

    def text(self, key: str) -> str:
        if isinstance(value := self._get(key), str):
            return value
        raise ValueError(f"`{key}` is not a text")

    def digest(self, key: str) -> str:
        return _digest(key, self._get(key))

    def digests(self, key: str) -> tuple[str, ...]:
        return tuple(_digest(key, value) for value in self.items(key))

    def flag(self, key: str) -> bool:
        if isinstance(value := self._get(key), bool):
            return value
        raise ValueError(f"`{key}` is neither true nor false")

    def count(self, key: str) -> int:
        return _count(key, self._get(key))

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns a shape that an array may have.

        The product of the non-zero sizes must be countable: numpy and tensorstore reject an empty
        array whose other sizes are too large.
        """
        return check_shape(key, tuple(_count(key, value) for value in self.items(key)))

    def items(self, key: str) -> list[object]:
        if isinstance(value := self._get(key), list):
            return value
        raise ValueError(f"`{key}` is not a list")

    def table(self, key: str) -> dict[str, object]:
        """Returns a JSON object, whose keys are strings."""
        if isinstance(value := self._get(key), dict):
            return value
        raise ValueError(f"`{key}` is not a table")

    def _get(self, key: str) -> object:
        if key not in self.plain:
            raise ValueError(f"`{key}` is missing")
        return self.plain[key]


def as_table(what: str, value: object) -> Fields:
    """Returns the fields of a value that should be a table, or raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a table")  # noqa: TRY004  # one kind for all bad data
    return Fields(value)


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


def _count(key: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_SIZE:
        return value
    raise ValueError(f"`{key}` is not a whole number of at least 0")


def _digest(key: str, value: object) -> str:
    if isinstance(value, str) and _DIGEST.fullmatch(value):
        return value
    raise ValueError(f"`{key}` is not a sha256")

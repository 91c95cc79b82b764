"""Reads fields of plain data that may be anything at all, JSON or a message's body."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_RANK = 32  # tensorstore's
MAX_SIZE = 2**62  # tensorstore's, and numpy can still multiply it by nothing but 1
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Fields:
    """Typed access to a mapping. Every method raises ValueError, which names the field."""

    plain: Mapping[str, object]

    def text(self, key: str) -> str:
        """Returns a string."""
        if isinstance(value := self._get(key), str):
            return value
        raise ValueError(f"`{key}` is not a text")

    def digest(self, key: str) -> str:
        """Returns a sha256 in hexadecimal digits."""
        return _digest(key, self._get(key))

    def digests(self, key: str) -> tuple[str, ...]:
        """Returns a list of them."""
        return tuple(_digest(key, value) for value in self.items(key))

    def flag(self, key: str) -> bool:
        """Returns true or false."""
        if isinstance(value := self._get(key), bool):
            return value
        raise ValueError(f"`{key}` is neither true nor false")

    def count(self, key: str) -> int:
        """Returns a whole number that is not negative."""
        return _count(key, self._get(key))

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns a shape that an array may have.

        The sizes without the zeros must multiply to something that can be counted: numpy and
        tensorstore refuse an array of nothing whose other sizes are too large.
        """
        return check_shape(key, tuple(_count(key, value) for value in self.items(key)))

    def items(self, key: str) -> list[object]:
        """Returns a list of anything."""
        if isinstance(value := self._get(key), list):
            return value
        raise ValueError(f"`{key}` is not a list")

    def table(self, key: str) -> dict[str, object]:
        """Returns an object of anything; JSON's keys are texts."""
        if isinstance(value := self._get(key), dict):
            return value
        raise ValueError(f"`{key}` is not a table")

    def _get(self, key: str) -> object:
        if key not in self.plain:
            raise ValueError(f"`{key}` is missing")
        return self.plain[key]


def as_table(what: str, value: object) -> Fields:
    """Returns the fields of what should be a table.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a table")  # noqa: TRY004  # one kind for all bad data
    return Fields(value)


def check_shape(key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape that an array may have.

    Raises:
        ValueError: it has too many axes or elements, or a negative size.
    """
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

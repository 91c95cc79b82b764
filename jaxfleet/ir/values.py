"""What an operator's attributes and operands can hold: data, and only data.

An attribute is none, a bool, an int, a float, a string, a `Word` (a bare word such as a dtype or
an enumeration's member), a `Dim`, a `Literal`, a `BlockRef`, a `Struct` (named fields) or a
tuple of these. An operand is a variable's name or a `Literal`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from jaxfleet.ir.dims import Dim


@dataclass(frozen=True, slots=True)
class Word:
    """A bare word: `f32`, `GatherScatterMode.CLIP`."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Refers to a block of the same program: `^1`."""

    index: int

    def __str__(self) -> str:
        return f"^{self.index}"


@dataclass(frozen=True, slots=True)
class Literal:
    """A scalar constant with its dtype: `2.0:f32`.

    The value is kept as text, so that NaN equals NaN and 0.0 differs from -0.0.
    """

    text: str
    dtype: str

    @classmethod
    def of(cls, value: bool | int | float | complex, dtype: str) -> "Literal":
        """Returns the literal of a Python number."""
        if isinstance(value, bool):
            return cls("true" if value else "false", dtype)
        if isinstance(value, complex):
            return cls(f"{value.real!r}+{value.imag!r}i", dtype)
        return cls(repr(value), dtype)

    @property
    def value(self) -> bool | int | float | complex:
        """The Python number."""
        if self.text in {"true", "false"}:
            return self.text == "true"
        if self.text.endswith("i"):
            real, imag = self.text[:-1].rsplit("+", 1)
            return complex(float(real), float(imag))
        return int(self.text) if self.text.lstrip("-").isdigit() else float(self.text)

    def __str__(self) -> str:
        return f"{self.text}:{self.dtype}"


@dataclass(frozen=True, slots=True)
class Struct:
    """Named fields under a name: `GatherDimensionNumbers{offset_dims=[0]}`."""

    name: str
    fields: "Attrs"


Attr: TypeAlias = (
    "None | bool | int | float | str | Word | Dim | Literal | BlockRef | Struct | tuple[Attr, ...]"
)
Operand: TypeAlias = str | Literal


class Attrs(Mapping[str, Attr]):
    """An immutable mapping, kept sorted by key, that can be hashed and compared.

    A float that is not a number is stored as the word `nan`, so that it equals itself; `1` and
    `1.0` and `true` are told apart.
    """

    __slots__ = ("_hash", "_items")

    def __init__(self, items: Mapping[str, Attr] | None = None) -> None:
        pairs = (items or {}).items()
        self._items: dict[str, Attr] = {key: _normal(value) for key, value in sorted(pairs)}
        self._hash: int | None = None

    def __getitem__(self, key: str) -> Attr:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attrs):
            return NotImplemented
        if self is other:
            return True
        return self._items == other._items and _kinds(self._items) == _kinds(other._items)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(tuple(self._items.items()))
        return self._hash

    def __repr__(self) -> str:
        return f"Attrs({self._items!r})"

    def updated(self, **changes: Attr) -> "Attrs":
        """Returns these attributes with some replaced or added."""
        return Attrs({**self._items, **changes})

    def without(self, *keys: str) -> "Attrs":
        """Returns these attributes less some."""
        return Attrs({key: value for key, value in self._items.items() if key not in keys})


def block_refs(attr: Attr) -> Iterator[BlockRef]:
    """Yields every block reference inside an attribute."""
    if isinstance(attr, BlockRef):
        yield attr
    elif isinstance(attr, Struct):
        for value in attr.fields.values():
            yield from block_refs(value)
    elif isinstance(attr, tuple):
        for value in attr:
            yield from block_refs(value)


def map_attr(attr: Attr, leaf: Callable[[Attr], Attr]) -> Attr:
    """Returns the attribute with `leaf` applied to everything in it that holds nothing else."""
    if isinstance(attr, tuple):
        return tuple(map_attr(value, leaf) for value in attr)
    if isinstance(attr, Struct):
        fields = {key: map_attr(value, leaf) for key, value in attr.fields.items()}
        return Struct(attr.name, Attrs(fields))
    return leaf(attr)


def _normal(value: Attr) -> Attr:
    if isinstance(value, float) and math.isnan(value):
        return Word("nan")
    if isinstance(value, tuple):
        return tuple(_normal(item) for item in value)
    return value


def _kinds(value: object) -> object:
    """Returns the shape of a value's numbers, since Python holds that True == 1 == 1.0."""
    if isinstance(value, dict):
        return tuple(_kinds(item) for item in value.values())
    if isinstance(value, tuple):
        return tuple(_kinds(item) for item in value)
    if isinstance(value, float):
        return "-0.0" if value == 0.0 and math.copysign(1.0, value) < 0 else "float"
    return type(value)

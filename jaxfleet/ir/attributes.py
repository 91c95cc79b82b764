"""Values of operators' attributes and operands: plain data only.

An attribute is none, a bool, an int, a float, a string, a `Word` (a bare word such as a dtype or an
enumeration's member), a `Dim`, a `Literal`, a `BlockRef`, a `Struct` (named fields) or a tuple of
these. An operand is a variable's name or a `Literal`.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ir.dims import Dim
from jaxfleet.ir.naming import PLAIN_WORD, dtype_text

_NOT_WORDS = frozenset({"true", "false", "none", "inf"})  # these parse as other values
_REAL = r"-?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|inf|nan)"
_REAL_TEXT = re.compile(_REAL)
_COMPLEX_TEXT = re.compile(rf"(?P<real>{_REAL})\+(?P<imag>{_REAL})i")


@dataclass(frozen=True, slots=True)
class Word:
    """A bare word: `f32`, `key<fry>`, `GatherScatterMode.CLIP`."""

    text: str

    def __post_init__(self) -> None:
        if self.text in _NOT_WORDS or PLAIN_WORD.fullmatch(self.text) is None:
            raise ProgramError(f"{self.text!r} is not a word", hint="give it as a string")

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A reference to a block of the same program: `^1`."""

    index: int

    def __post_init__(self) -> None:
        if self.index < 0:
            raise ProgramError(f"{self.index} is not a block's index")

    def __str__(self) -> str:
        return f"^{self.index}"


@dataclass(frozen=True, slots=True)
class Literal:
    """A scalar constant with its dtype: `2.0:f32`.

    The value is kept as text, so that NaN equals NaN and 0.0 differs from -0.0.
    """

    text: str
    dtype: str

    def __post_init__(self) -> None:
        if not (
            self.text in {"true", "false"}
            or _REAL_TEXT.fullmatch(self.text)
            or _COMPLEX_TEXT.fullmatch(self.text)
        ):
            raise ProgramError(f"{self.text!r} is not a literal's value", hint="use Literal.of")

    @classmethod
    def of(cls, value: complex | np.generic, dtype: str) -> "Literal":
        """Returns the literal of a Python or numpy number."""
        number: Any = value.item() if isinstance(value, np.generic) else value
        if isinstance(number, bool):
            return cls("true" if number else "false", dtype)
        if isinstance(number, complex):
            return cls(f"{number.real!r}+{number.imag!r}i", dtype)
        return cls(repr(number), dtype)

    @property
    def value(self) -> bool | int | float | complex:
        if self.text in {"true", "false"}:
            return self.text == "true"
        if match := _COMPLEX_TEXT.fullmatch(self.text):
            return complex(float(match["real"]), float(match["imag"]))
        return int(self.text) if self.text.lstrip("-").isdigit() else float(self.text)

    def __str__(self) -> str:
        return f"{self.text}:{dtype_text(self.dtype)}"


@dataclass(frozen=True, slots=True)
class Struct:
    """Named fields under a name: `GatherDimensionNumbers{offset_dims=[0]}`."""

    name: str
    fields: "Attrs"


Attr: TypeAlias = (
    "bool | int | float | str | Word | Dim | Literal | BlockRef | Struct | tuple[Attr, ...] | None"
)
Operand: TypeAlias = str | Literal


class Attrs(Mapping[str, Attr]):
    """An immutable, hashable mapping, sorted by key.

    NaN is stored as the word `nan`, so that it equals itself; `1`, `1.0` and `true` are distinct. A
    list is stored as a tuple, a numpy number as Python's.

    Raises:
        ProgramError: a value is not plain data, or a key is not a string.
    """

    __slots__ = ("_hash", "_items", "_refs")

    def __init__(self, items: Mapping[str, Attr] | None = None) -> None:
        self._items: dict[str, Attr] = {}
        for key, value in sorted((items or {}).items()):
            try:
                self._items[key] = value if type(value) in _AS_IS else _normal(value)
            except TypeError as error:
                raise ProgramError(f"attribute '{key}' {error}") from None
        self._hash: int | None = None
        self._refs: tuple[BlockRef, ...] | None = None

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

    @property
    def block_refs(self) -> tuple[BlockRef, ...]:
        """Every block reference in the attributes, in order."""
        if self._refs is None:
            self._refs = tuple(ref for value in self._items.values() for ref in block_refs(value))
        return self._refs

    def updated(self, **changes: Attr) -> "Attrs":
        """Returns these attributes with some replaced or added."""
        return Attrs({**self._items, **changes})

    def without(self, *keys: str) -> "Attrs":
        """Returns these attributes without some."""
        return Attrs({key: value for key, value in self._items.items() if key not in keys})


def block_refs(attr: Attr) -> Iterator[BlockRef]:
    """Yields every block reference inside an attribute."""
    if isinstance(attr, BlockRef):
        yield attr
    elif isinstance(attr, Struct):
        yield from attr.fields.block_refs
    elif isinstance(attr, tuple):
        for value in attr:
            yield from block_refs(value)


def map_attr(attr: Attr, leaf: Callable[[Attr], Attr]) -> Attr:
    """Returns the attribute with `leaf` applied to every value in it that is not a container."""
    if isinstance(attr, tuple):
        return tuple(map_attr(value, leaf) for value in attr)
    if isinstance(attr, Struct):
        fields = {key: map_attr(value, leaf) for key, value in attr.fields.items()}
        return Struct(attr.name, Attrs(fields))
    return leaf(attr)


_AS_IS = frozenset({type(None), bool, int, str, Word, Dim, Literal, BlockRef, Struct})


def _normal(value: Any) -> Attr:
    """Returns the stored form of a value; `where` continues the attribute's name in errors."""
    if type(value) in _AS_IS:
        kept: Attr = value
        return kept
    if isinstance(value, tuple | list):
        return tuple(_normal(item) for item in value)
    if isinstance(value, np.generic) and not isinstance(value, np.longdouble | np.clongdouble):
        return _normal(value.item())
    if isinstance(value, float):
        return Word("nan") if math.isnan(value) else float(value)
    # An enumeration's member may also be an int or a string, and would print as one.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"holds {value!r}, which is not data")


def _kinds(value: object) -> object:
    """Returns the types of a value's numbers, because True == 1 == 1.0 in Python."""
    if isinstance(value, dict):
        return tuple(_kinds(item) for item in value.values())
    if isinstance(value, tuple):
        return tuple(_kinds(item) for item in value)
    if isinstance(value, float):
        return "-0.0" if value == 0.0 and math.copysign(1.0, value) < 0 else "float"
    return type(value)

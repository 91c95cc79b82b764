"""The protocol-buffer text format of descriptions, as pslib reads it.

::

    table_id: 0
    accessor {
      fea_dim: 11
      weight_bounds: -10.0
      weight_bounds: 10.0
    }

A repeated field is written once per value, and an unset one is omitted. Fields are ordered by
number, if they have numbers (`wire_format`).
"""

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from jaxfleet.errors import ProgramError, TextError

T = TypeVar("T")
_WORD = re.compile(
    r"""\s+|\#[^\n]*|(?P<word>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[{}:,;\[\]]|[^\s{}:,;\#"'\[\]]+)"""
)
_BOOLS = {"true": True, "false": False}
_ESCAPE = re.compile(rb"\\([0-7]{1,3}|[xX][0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|.)")
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def to_text(description: Any) -> str:
    """Formats a description."""
    return "".join(f"{line}\n" for line in _lines(description, ""))


def _lines(description: Any, indent: str) -> Iterator[str]:
    for one in sorted(fields(description), key=lambda one: int(one.metadata.get("number", 0))):
        value = getattr(description, one.name)
        for item in value if isinstance(value, tuple) else () if value is None else (value,):
            if is_dataclass(item):
                yield f"{indent}{one.name} {{"
                yield from _lines(item, indent + "  ")
                yield f"{indent}}}"
            else:
                is_name = one.metadata.get("kind") == "enum"
                yield f"{indent}{one.name}: {_said(item, is_name=is_name)}"


def _said(value: Any, *, is_name: bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if is_name else f'"{"".join(map(_character, value.encode()))}"'
    return repr(value)


def _character(byte: int) -> str:
    """Writes a byte as protocol buffers do: octal unless printable."""
    if byte in b'"\\':
        return f"\\{byte:c}"
    return chr(byte) if 0x20 <= byte < 0x7F else f"\\{byte:03o}"


def _unquoted(word: str) -> str:
    """Decodes a quoted string; its bytes must be UTF-8 (ValueError)."""

    def read(escape: re.Match[bytes]) -> bytes:
        code = escape[1]
        if code[:1].isdigit():
            return bytes([int(code, 8) & 0xFF])
        if code[:1] == b"u" and len(code) > 1:
            return chr(int(code[1:], 16)).encode()
        if code[:1] in b"xX" and len(code) > 1:
            return bytes([int(code[1:], 16)])
        return _ESCAPED.get(code, code)

    return _ESCAPE.sub(read, word[1:-1].encode()).decode()


def from_text(text: str, kind: type[T], source: str = "the text") -> T:
    """Parses a description.

    Comments begin with `#`; `source` names the text in errors.

    Raises:
        TextError: the text is malformed, or has an unknown field.
    """
    return _Reader(text, source).message(kind, end=None)


def from_file(strategy: Mapping[str, Any], kind: type[T]) -> T:
    """Parses the description file that a strategy names in `fleet_desc_file`; empty without one.

    Raises:
        ProgramError: the file cannot be read.
        TextError: its text is malformed.
    """
    path = strategy.get("fleet_desc_file")
    if path is None:
        return kind()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ProgramError(f"fleet_desc_file '{path}' cannot be read: {error}") from error
    return from_text(text, kind, str(path))


class _Reader:
    def __init__(self, text: str, source: str) -> None:
        self._text, self._source = text, source
        self._words = list(self._split())
        self._at = 0

    def message(self, kind: type[T], end: str | None) -> T:
        """Reads fields up to a bracket or the end of the text."""
        hints, found = get_type_hints(kind), dict[str, Any]()
        while (word := self._next(end)) != end:
            if word in {",", ";"}:
                continue
            if word not in hints:
                raise self._error(f"{kind.__name__} has no field '{word}'")
            self._field(hints[word], str(word), found)
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in found.items()})

    def _field(self, hint: Any, name: str, found: dict[str, Any]) -> None:
        wanted, is_repeated = type_of_field(hint)
        colon = self._peek() == ":"
        self._at += colon
        if isinstance(wanted, type) and is_dataclass(wanted):
            self._expect("{")
            value: Any = self.message(wanted, "}")
        else:
            if not colon:
                raise self._error(f"':' is missing after '{name}'")
            value = self._value(name, wanted)
        if is_repeated:
            found.setdefault(name, []).append(value)
        elif name in found:
            raise self._error(f"'{name}' is given twice")
        else:
            found[name] = value

    def _value(self, name: str, kind: Any) -> Any:
        word = str(self._next(None, may_end=False))
        try:
            if kind is bool:
                return _BOOLS[word]
            if kind is str and word[0] in "\"'":
                return _unquoted(word)
            return kind(word)
        except (KeyError, ValueError):
            raise self._error(f"'{name}' is a {kind.__name__}, and {word} is none") from None

    def _expect(self, wanted: str) -> None:
        if (word := self._next(None, may_end=False)) != wanted:
            raise self._error(f"'{wanted}' is missing before {word!r}")

    def _peek(self) -> str | None:
        return self._words[self._at][0] if self._at < len(self._words) else None

    def _next(self, end: str | None, *, may_end: bool = True) -> str | None:
        word = self._peek()
        if word is None and (end is not None or not may_end):
            raise self._error("the text ends in the middle")
        self._at += 1
        return word

    def _split(self) -> Iterator[tuple[str, int]]:
        at = 0
        while at < len(self._text):
            found = _WORD.match(self._text, at)
            if found is None:
                self._words = [(self._text[at], at)]
                self._at = 1
                raise self._error(f"{self._text[at : at + 20]!r} is not a word")
            if found["word"] is not None:
                yield found["word"], at
            at = found.end()

    def _error(self, what: str) -> TextError:
        words = self._words[: self._at]
        line = self._text.count("\n", 0, words[-1][1]) + 1 if words else 1
        hint = "docs/fluid.md names the list of fields"
        return TextError(f"{self._source}, line {line}: {what}", hint=hint)


def type_of_field(hint: Any) -> tuple[Any, bool]:
    """Type of a field's values, and whether the field is repeated."""
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    if get_origin(hint) is types.UnionType:
        return next(x for x in get_args(hint) if x is not type(None)), False
    return hint, False

"""Readers for parts of a line: types, operands, slots, attributes."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from jaxfleet.errors import ProgramError, TextError
from jaxfleet.ir.attributes import Attr, Attrs, BlockRef, Literal, Operand, Struct, Word
from jaxfleet.ir.dims import Dim, Size, parse_size
from jaxfleet.ir.lexer import MOST_NESTED, Line, name_of, string_of
from jaxfleet.ir.naming import PLAIN_WORD, RESERVED
from jaxfleet.ir.program import Operands

_TYPE = re.compile(r'(?P<dtype>"(?:[^"\\]|\\.)*"|[^"\[]*)\[(?P<sizes>[^\]]*)\]')
Item = TypeVar("Item")
_WORDS: dict[str, bool | float | None] = {
    "none": None,
    "true": True,
    "false": False,
    "inf": float("inf"),
}


def read_type(line: Line) -> tuple[str, tuple[Size, ...]]:
    """Takes a type: `f32[b,784]`."""
    word = line.peek()
    try:
        found = _type_of(word)
    except TextError as error:
        raise line.wrong(error.what) from None
    if found is None:
        raise line.expected("a type such as f32[b,784]")
    line.next()
    return found


def parse_type(text: str) -> tuple[str, tuple[Size, ...]]:
    """Reads a text that is just a type.

    Raises:
        TextError: the text is not a type.
    """
    found = _type_of(text)
    if found is None:
        raise TextError(f"'{text}' is not a type", hint="types read like f32[b,784]")
    return found


def read_operand(line: Line) -> Operand:
    """Takes a variable's name, or a literal: `2.0:f32`."""
    word = line.peek()
    name = name_of(word)
    if name is not None:
        line.next()
        return name
    if not starts_literal(word):
        raise line.expected("a variable or a literal")
    return _literal(line)


def read_items(line: Line, close: str, read: Callable[[Line], Item]) -> tuple[Item, ...]:
    """Takes operands separated by commas, and the closing mark."""
    items = []
    while not line.take(close):
        items.append(read(line))
        if line.peek() != close:
            line.expect(",")
    return tuple(items)


def read_inputs(line: Line) -> Operands:
    """Takes an operator's inputs, from after its `(` to its `)`."""
    slots: list[tuple[str, tuple[Operand, ...]]] = []
    while not line.take(")"):
        slot = _slot(line) if line.peek(1) == "=" else ""
        slots.append((slot, _slot_items(line, slot, read_operand)))
        if line.peek() != ")":
            line.expect(",")
    return Operands(slots)


def read_outputs(line: Line, read: Callable[[Line], Operand]) -> Operands:
    """Takes an operator's outputs and the `=` after them."""
    slots: list[tuple[str, tuple[Operand, ...]]] = []
    while True:
        # `Out=y = op(x)` names a slot, `y = op(x)` does not: there a call follows the sign.
        slot = _slot(line) if line.peek(1) == "=" and line.peek(3) != "(" else ""
        slots.append((slot, _slot_items(line, slot, read)))
        if not line.take(","):
            line.expect("=")
            return Operands(slots)


def read_attrs(line: Line) -> Attrs:
    """Takes attributes in braces."""
    line.expect("{")
    found: dict[str, Attr] = {}
    while not line.take("}"):
        name = line.name()
        if name in found:
            raise line.wrong(f"attribute '{name}' is given twice")
        line.expect("=")
        found[name] = read_attr(line)
        if line.peek() != "}":
            line.expect(",")
    return Attrs(found)


def read_tuple(line: Line) -> tuple[Attr, ...]:
    """Takes attributes in brackets."""
    line.expect("[")
    items: list[Attr] = []
    while not line.take("]"):
        items.append(read_attr(line))
        if line.peek() != "]":
            line.expect(",")
    return tuple(items)


def read_dtype(line: Line) -> str:
    """Takes a dtype: `f32`, `key<fry>`, or any other in quotes."""
    dtype = _dtype_of(line.peek())
    if dtype is None:
        raise line.expected("a dtype such as f32")
    line.next()
    return dtype


def starts_literal(word: str) -> bool:
    """Whether a word is the value of a literal."""
    # A complex number may start with a word: nan+1.0i.
    return _is_number(word) or word in RESERVED or word.startswith(("inf+", "nan+"))


def _slot(line: Line) -> str:
    name = line.name()
    line.expect("=")
    return name


def _slot_items(line: Line, slot: str, read: Callable[[Line], Operand]) -> tuple[Operand, ...]:
    return read_items(line, "]", read) if slot and line.take("[") else (read(line),)


@lru_cache(maxsize=1 << 16)
def _type_of(word: str) -> tuple[str, tuple[Size, ...]] | None:
    match = _TYPE.fullmatch(word)
    dtype = _dtype_of(match["dtype"]) if match else None
    if match is None or dtype is None:
        return None
    return dtype, tuple(map(parse_size, _sizes(match["sizes"])))


def _dtype_of(word: str) -> str | None:
    if word[:1] == '"':
        return string_of(word)
    return word if PLAIN_WORD.fullmatch(word) and word not in RESERVED else None


def _sizes(text: str) -> list[str]:
    """Splits at the commas outside parentheses."""
    parts, start, depth = [], 0, 0
    for at, mark in enumerate(text):
        depth += (mark == "(") - (mark == ")")
        if depth > MOST_NESTED:
            raise TextError(f"a size has more than {MOST_NESTED} parentheses")
        if mark == "," and not depth:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]] if text.strip() else []


def _is_number(word: str) -> bool:
    return word[:1].isdecimal() or (word[:1] == "-" and word != "->" and len(word) > 1)


def _literal(line: Line) -> Literal:
    text = line.next()
    if not line.take(":"):
        raise line.expected(f"':' and the dtype of the literal {text}")
    try:
        return Literal(text, read_dtype(line))
    except TextError:
        raise
    except ProgramError as error:
        raise line.wrong(error.what) from None


def read_attr(line: Line) -> Attr:
    """Takes an attribute's value."""
    word = line.peek()
    if line.peek(1) == ":" and starts_literal(word):
        return _literal(line)
    if _is_number(word):
        return _number(line)
    match word[:1]:
        case '"':
            return _string(line)
        case "<":
            return _dim(line)
        case "[":
            return read_tuple(line)
        case "{":
            return Struct("", read_attrs(line))
        case "^":
            line.next()
            return _block_ref(line)
        case _:
            return _word(line)


def _string(line: Line) -> Attr:
    text = string_of(line.peek())
    if text is None:
        raise line.expected("a string")
    line.next()
    return Struct(text, read_attrs(line)) if line.peek() == "{" else text


def _dim(line: Line) -> Attr:
    word = line.peek()
    try:
        size = parse_size(word[1:-1])
    except TextError as error:
        raise line.wrong(error.what) from None
    if not isinstance(size, Dim):
        raise line.expected("a size with a letter between < and >")
    line.next()
    return size


def _block_ref(line: Line) -> Attr:
    if line.peek()[:1] == "-":
        raise line.expected("a block's number")
    return BlockRef(line.integer())


def _number(line: Line) -> Attr:
    word = line.peek()
    try:
        number = int(word) if word.removeprefix("-").isdecimal() else float(word)
    except ValueError:
        raise line.expected("a number") from None
    line.next()
    return number


def _word(line: Line) -> Attr:
    text = line.peek()
    if line.peek(1) == "{" and name_of(text) is not None:
        line.next()
        return Struct(text, read_attrs(line))
    if text in _WORDS:
        line.next()
        return _WORDS[text]
    try:
        word = Word(text)
    except ProgramError:
        raise line.expected("a value") from None
    line.next()
    return word

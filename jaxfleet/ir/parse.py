"""Reads programs from text; the grammar is in `jaxfleet.ir.text`, which prints it."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxfleet.errors import TextError
from jaxfleet.ir.dims import Dim, Size, parse_size
from jaxfleet.ir.program import NO_SOURCE, Block, Operands, Operator, Program, Role
from jaxfleet.ir.source import Source
from jaxfleet.ir.types import Constant, Kind, Variable
from jaxfleet.ir.values import Attr, Attrs, BlockRef, Literal, Operand, Struct, Word

_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<comment>\#.*)
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<dim><[^>]*>)
  | (?P<arrow>->)
  | (?P<number>-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|inf|nan)(?:[+]-?(?:[\d.]+(?:e[+-]?\d+)?|inf|nan)i)?)
  | (?P<name>[A-Za-z_][\w./@$~+-]*)
  | (?P<mark>[(){}\[\]=,:^@*+|-])
    """,
    re.VERBOSE,
)
_COMMENT = re.compile(
    r"#\s*(?:(?P<file>[^;]*?):(?P<line>\d+), in (?P<function>[^;]*))?"
    r"(?:; )?(?:at (?P<scope>[^;]*))?(?:; )?(?:by (?P<made_by>[^;]*))?$"
)
_ROLES = {role.value: role for role in Role}
_KINDS = {kind.value: kind for kind in Kind}
_WORDS: dict[str, None | bool | float] = {
    "none": None,
    "true": True,
    "false": False,
    "inf": float("inf"),
}


def parse(text: str) -> Program:
    """Reads one program.

    Constants come back by digest, without their values: `jaxfleet.ir.resources` adds those.

    Raises:
        TextError: the text is not a program; the error names the line and what was expected.
    """
    programs = parse_all(text)
    if len(programs) != 1:
        raise TextError(f"expected one program, found {len(programs)}", hint="use parse_all")
    return programs[0]


def parse_all(text: str) -> list[Program]:
    """Reads every program in a text, one after another."""
    drafts: list[_Draft] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = _Line(line, number)
        if words.done:
            continue
        if words.peek() == "program":
            drafts.append(_Draft(*_program_heading(words)))
        elif not drafts:
            raise words.error("a line 'program NAME' first")
        else:
            _add_line(drafts[-1], words)
        words.end()
    return [draft.finish() for draft in drafts]


@dataclass
class _DraftBlock:
    """A block while its lines are being read."""

    index: int
    parent: int
    variables: dict[str, Variable] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    ops: list[Operator] = field(default_factory=list)
    results: tuple[Operand, ...] = ()
    role: Role | None = None


@dataclass
class _Draft:
    """A program while its lines are being read."""

    name: str
    attrs: Attrs
    variables: dict[str, Variable] = field(default_factory=dict)
    blocks: list[_DraftBlock] = field(default_factory=list)

    def finish(self) -> Program:
        blocks = tuple(
            Block(b.index, b.parent, b.variables, b.args, tuple(b.ops), b.results)
            for b in self.blocks
        )
        return Program(self.name, self.variables, blocks or (Block(),), self.attrs)


class _Line:
    """The words of one line, read from left to right."""

    def __init__(self, text: str, number: int) -> None:
        self.text = text
        self.number = number
        self.words: list[tuple[str, str]] = []
        self.comment = ""
        self.at = 0
        place = 0
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None:
                raise self.error(f"a word at column {place + 1}")
            kind = match.lastgroup or ""
            if kind == "comment":
                self.comment = match.group()
            elif kind != "space":
                self.words.append((kind, match.group()))
            place = match.end()

    @property
    def done(self) -> bool:
        return self.at >= len(self.words)

    def peek(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.words[at][1] if at < len(self.words) else ""

    def kind(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.words[at][0] if at < len(self.words) else ""

    def next(self) -> str:
        if self.done:
            raise self.error("more")
        self.at += 1
        return self.words[self.at - 1][1]

    def take(self, word: str) -> bool:
        found = self.peek() == word and self.kind() != "string"
        self.at += found
        return found

    def expect(self, word: str) -> None:
        if not self.take(word):
            raise self.error(f"'{word}'")

    def end(self) -> None:
        if not self.done:
            raise self.error("the end of the line")

    def error(self, expected: str) -> TextError:
        found = f"'{self.peek()}'" if self.words and not self.done else "the end of the line"
        what = f"line {self.number}: expected {expected}, found {found}"
        return TextError(f"{what}: {self.text.strip()}")

    def name(self) -> str:
        if self.kind() == "string":
            text: str = json.loads(self.next())
            return text
        if self.kind() != "name":
            raise self.error("a name")
        return self.next()

    def integer(self) -> int:
        text = self.next()
        if not text.isdigit():
            self.at -= 1
            raise self.error("a number")
        return int(text)


def _program_heading(words: _Line) -> tuple[str, Attrs]:
    words.expect("program")
    name = words.name()
    return name, _attrs(words) if words.peek() == "{" else Attrs()


def _add_line(draft: _Draft, words: _Line) -> None:
    first, bare = words.peek(), words.kind() == "name"
    declares = bare and first in _KINDS and words.kind(1) in {"name", "string"}
    if bare and first == "block" and words.kind(1) == "number":
        draft.blocks.append(_block_heading(draft, words))
    elif declares:
        variable = _declaration(words)
        scope = draft.blocks[-1].variables if draft.blocks else draft.variables
        if variable.name in scope:
            raise TextError(f"line {words.number}: '{variable.name}' is declared twice")
        scope[variable.name] = variable
    elif not draft.blocks:
        raise words.error("a declaration or 'block 0'")
    elif (role := _role_heading(words)) is not None:
        draft.blocks[-1].role = role
    else:
        _operator(draft.blocks[-1], words)


def _role_heading(words: _Line) -> Role | None:
    heading = words.text.split("#")[0].strip()
    role = _ROLES.get(heading)
    if role is not None:
        words.at = len(words.words)
    return role


def _declaration(words: _Line) -> Variable:
    kind = _KINDS[words.next()]
    name = words.name()
    words.expect(":")
    dtype, shape = _type(words)
    constant = None
    if words.take("="):
        words.expect("@")
        constant = Constant(words.name())
    return Variable(name, dtype, shape, kind, constant)


def _type(words: _Line) -> tuple[str, tuple[Size, ...]]:
    dtype = words.name()
    if words.kind() == "dim":
        dtype += words.next()
    words.expect("[")
    depth, text = 0, ""
    while depth or words.peek() != "]":
        word = words.next()
        depth += (word == "(") - (word == ")")
        text += "\n" if word == "," and not depth else word
    words.expect("]")
    return dtype, tuple(parse_size(part) for part in text.split("\n")) if text else ()


def _block_heading(draft: _Draft, words: _Line) -> _DraftBlock:
    words.expect("block")
    index = words.integer()
    if index != len(draft.blocks):
        raise TextError(f"line {words.number}: block {index} comes as number {len(draft.blocks)}")
    parent = -1 if index == 0 else 0
    if words.take("in"):
        parent = words.integer()
    block = _DraftBlock(index, parent)
    if words.take("("):
        while not words.take(")"):
            name = words.name()
            words.expect(":")
            dtype, shape = _type(words)
            block.variables[name] = Variable(name, dtype, shape)
            block.args += (name,)
            words.take(",")
        words.expect("->")
        words.expect("(")
        block.results = tuple(_items(words, ")", _operand))
    return block


def _items(words: _Line, close: str, read: "Callable[[_Line], Operand]") -> Sequence[Operand]:
    items = []
    while not words.take(close):
        items.append(read(words))
        if words.peek() != close:
            words.expect(",")
    return items


def _operand(words: _Line) -> Operand:
    literal_word = words.kind() == "name" and words.peek() in {"true", "false", "inf", "nan"}
    if words.kind() == "number" or literal_word:
        text = words.next()
        words.expect(":")
        return Literal(text, words.name())
    return words.name()


def _operator(block: _DraftBlock, words: _Line) -> None:
    if block.role is None:
        raise words.error("a role heading such as 'forward' before the first operator")
    outputs = Operands() if words.peek(1) == "(" else _outputs(block, words)
    op_type = words.name()
    words.expect("(")
    inputs = _slots(words, _operand)
    attrs = _attrs(words) if words.peek() == "{" else Attrs()
    role_var = _role_var(words) if words.take("for") else ()
    source = _source(words.comment) if words.comment else NO_SOURCE
    block.ops.append(Operator(op_type, inputs, outputs, attrs, block.role, role_var, source))


def _outputs(block: _DraftBlock, words: _Line) -> Operands:
    def output(line: _Line) -> Operand:
        name = line.name()
        if line.take(":"):
            dtype, shape = _type(line)
            if name in block.variables:
                raise TextError(f"line {line.number}: '{name}' has a type twice")
            block.variables[name] = Variable(name, dtype, shape)
        return name

    slots: list[tuple[str, tuple[Operand, ...]]] = []
    while True:
        slot = words.name() if _starts_slot(words) else ""
        if slot:
            words.expect("=")
        if slot and words.take("["):
            slots.append((slot, tuple(_items(words, "]", output))))
        else:
            slots.append((slot, (output(words),)))
        if not words.take(","):
            words.expect("=")
            return Operands(slots)


def _starts_slot(words: _Line) -> bool:
    """Tells `Out=y = op(x)` from `y = op(x)`: what follows the sign is no operator call."""
    return words.peek(1) == "=" and words.peek(3) != "("


def _slots(words: _Line, read: "Callable[[_Line], Operand]") -> Operands:
    slots: list[tuple[str, tuple[Operand, ...]]] = []
    while not words.take(")"):
        slot = ""
        if words.peek(1) == "=":
            slot = words.name()
            words.expect("=")
        if slot and words.take("["):
            slots.append((slot, tuple(_items(words, "]", read))))
        else:
            slots.append((slot, (read(words),)))
        if words.peek() != ")":
            words.expect(",")
    return Operands(slots)


def _role_var(words: _Line) -> tuple[tuple[str, str], ...]:
    pairs = []
    while True:
        words.expect("(")
        param = words.name()
        words.expect(",")
        pairs.append((param, words.name()))
        words.expect(")")
        if not words.take(","):
            return tuple(pairs)


def _attrs(words: _Line) -> Attrs:
    words.expect("{")
    found: dict[str, Attr] = {}
    while not words.take("}"):
        name = words.name()
        words.expect("=")
        found[name] = _attr(words)
        if words.peek() != "}":
            words.expect(",")
    return Attrs(found)


def _attr(words: _Line) -> Attr:
    kind, text = words.kind(), words.peek()
    if kind == "string":
        value: str = json.loads(words.next())
        return value
    if kind == "dim":
        return _dim(words)
    if words.take("["):
        items: list[Attr] = []
        while not words.take("]"):
            items.append(_attr(words))
            if words.peek() != "]":
                words.expect(",")
        return tuple(items)
    if words.take("^"):
        return BlockRef(words.integer())
    if words.take("{"):
        words.at -= 1
        return Struct("", _attrs(words))
    if words.peek(1) == ":" and (kind == "number" or text in {"true", "false", "inf", "nan"}):
        literal = _operand(words)
        assert isinstance(literal, Literal)
        return literal
    if kind == "number":
        return _number(words)
    if kind != "name":
        raise words.error("a value")
    return _word(words)


def _dim(words: _Line) -> Attr:
    size = parse_size(words.next()[1:-1])
    if not isinstance(size, Dim):
        words.at -= 1
        raise words.error("a size with a letter between < and >")
    return size


def _number(words: _Line) -> Attr:
    text = words.next()
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _word(words: _Line) -> Attr:
    text = words.next()
    if words.kind() == "dim":
        return Word(text + words.next())
    if words.peek() == "{":
        return Struct(text, _attrs(words))
    return _WORDS[text] if text in _WORDS else Word(text)


def _source(comment: str) -> Source:
    match = _COMMENT.match(comment)
    if match is None:
        return NO_SOURCE
    part = {key: value or "" for key, value in match.groupdict().items()}
    line = int(part["line"] or 0)
    return Source(part["file"], line, part["function"], part["scope"], part["made_by"])

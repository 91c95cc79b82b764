"""Reads programs from text; the grammar is in `jaxfleet.ir.printer`, which prints it."""

import re
from dataclasses import dataclass, field

from jaxfleet.errors import ProgramError, TextError
from jaxfleet.ir.attributes import Attrs, Operand
from jaxfleet.ir.dims import Size
from jaxfleet.ir.lexer import MOST_NESTED, Line
from jaxfleet.ir.program import NO_ATTRS, NO_OPERANDS, NO_SOURCE, Block, Operator, Program, Role
from jaxfleet.ir.source import Source
from jaxfleet.ir.value_parser import (
    read_attrs,
    read_inputs,
    read_items,
    read_operand,
    read_outputs,
    read_tuple,
    read_type,
    starts_literal,
)
from jaxfleet.ir.variable import Constant, Kind, Variable, constant_of

_COMMENT = re.compile(
    r"#\s*(?:(?P<file>[^;]*?):(?P<line>\d+), in (?P<function>[^;]*))?"
    r"(?:; )?(?:at (?P<scope>[^;]*))?(?:; )?(?:by (?P<made_by>[^;]*))?$"
)
_ROLES = {role.value: role for role in Role}
_KINDS = {kind.value: kind for kind in Kind}
_AFTER_A_NAME = frozenset({"(", ":", ",", "="})  # tokens after the first name of an operator line


def parse(text: str) -> Program:
    """Reads one program.

    Constants are read by digest, without their values, unless the text contains them:
    `jaxfleet.ir.serialization` adds the others.

    Raises:
        TextError: the text is not a program; the error names the line and the expected token.
    """
    programs = parse_all(text)
    if not programs:
        raise TextError("expected a program, found none", hint="it starts with 'program NAME'")
    if len(programs) > 1:
        names = ", ".join(f"'{program.name}'" for program in programs)
        raise TextError(f"expected one program, found {names}", hint="use parse_all")
    return programs[0]


def parse_all(text: str) -> list[Program]:
    """Reads every program in a text, one after another.

    Raises:
        TextError: as `parse` does.
    """
    drafts: list[_Draft] = []
    for number, text_line in enumerate(text.split("\n"), start=1):
        line = Line(text_line, number)
        if line.empty:
            continue
        line.check_nesting()
        if _opens(line, "program"):
            drafts.append(_program_heading(line))
        elif not drafts:
            raise line.expected("a line 'program NAME' first")
        else:
            drafts[-1].add(line)
        line.end()
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
    depth: int = 0  # of nesting

    def read_name(self, line: Line) -> str:
        """Takes a name; a type after it declares the name in this block."""
        name = line.name()
        if line.take(":"):
            _declare(Variable(name, *read_type(line)), self.variables, line)
        return name

    def read_output(self, line: Line) -> Operand:
        """Takes an output: a name, or a literal, which the verifier rejects."""
        return read_operand(line) if starts_literal(line.peek()) else self.read_name(line)

    def finish(self) -> Block:
        return Block(
            self.index, self.parent, self.variables, self.args, tuple(self.ops), self.results
        )


@dataclass
class _Draft:
    """A program while its lines are being read."""

    name: str
    attrs: Attrs
    variables: dict[str, Variable] = field(default_factory=dict)
    blocks: list[_DraftBlock] = field(default_factory=list)

    def add(self, line: Line) -> None:
        """Adds the content of one line."""
        if _opens(line, "block"):
            self._open_block(line)
        elif _opens(line, *_KINDS):
            scope = self.blocks[-1].variables if self.blocks else self.variables
            _declare(_declaration(line), scope, line)
        elif not self.blocks:
            raise line.expected("a declaration or 'block 0'")
        elif (role := _role_heading(line)) is not None:
            self.blocks[-1].role = role
        else:
            self.blocks[-1].ops.append(_operator(self.blocks[-1], line))

    def _open_block(self, line: Line) -> None:
        block = _block_heading(line, place=len(self.blocks))
        if 0 <= block.parent < len(self.blocks):
            block.depth = self.blocks[block.parent].depth + 1
        if block.depth > MOST_NESTED:
            raise line.wrong(f"more than {MOST_NESTED} blocks in each other")
        self.blocks.append(block)

    def finish(self) -> Program:
        blocks = tuple(block.finish() for block in self.blocks)
        return Program(self.name, self.variables, blocks or (Block(),), self.attrs)


def _opens(line: Line, *keywords: str) -> bool:
    """Whether a keyword opens the line, as opposed to a variable or operator of that name."""
    following = line.peek(1)
    return line.peek() in keywords and following != "" and following not in _AFTER_A_NAME


def _program_heading(line: Line) -> _Draft:
    line.expect("program")
    return _Draft(line.name(), read_attrs(line) if line.peek() == "{" else NO_ATTRS)


def _declaration(line: Line) -> Variable:
    kind = _KINDS[line.next()]
    name = line.name()
    line.expect(":")
    dtype, shape = read_type(line)
    constant = _constant(line, dtype, shape) if line.take("=") else None
    return Variable(name, dtype, shape, kind, constant)


def _constant(line: Line, dtype: str, shape: tuple[Size, ...]) -> Constant:
    """Takes a constant's digest, or its values."""
    if line.take("@"):
        return Constant(line.name())
    if line.peek() != "[":
        raise line.expected("'@' and a digest, or '[' and the values")
    try:
        return constant_of(read_tuple(line), dtype, shape)
    except TextError:
        raise
    except ProgramError as error:
        raise line.wrong(error.what) from None


def _declare(variable: Variable, scope: dict[str, Variable], line: Line) -> None:
    if variable.name in scope:
        raise line.wrong(f"'{variable.name}' is declared twice")
    scope[variable.name] = variable


def _block_heading(line: Line, *, place: int) -> _DraftBlock:
    line.expect("block")
    index = line.integer()
    if index != place:
        raise line.wrong(f"expected block {place}", hint="blocks are numbered from 0, in order")
    block = _DraftBlock(index, parent=-1 if index == 0 else 0)
    if line.take("in"):
        block.parent = line.integer()
    if line.take("("):
        block.args = read_items(line, ")", block.read_name)
        line.expect("->")
        line.expect("(")
        block.results = read_items(line, ")", read_operand)
    return block


def _role_heading(line: Line) -> Role | None:
    role = _ROLES.get(line.code)
    if role is not None:
        line.skip()
    return role


def _operator(block: _DraftBlock, line: Line) -> Operator:
    if not line.peek(1):
        what = "a role heading, a declaration or an operator"
        raise line.expected(what, hint=f"the roles are {', '.join(_ROLES)}")
    if block.role is None:
        raise line.expected("a role heading such as 'forward' before the first operator")
    outputs = NO_OPERANDS if line.peek(1) == "(" else read_outputs(line, block.read_output)
    op_type = line.name()
    line.expect("(")
    inputs = read_inputs(line)
    attrs = read_attrs(line) if line.peek() == "{" else NO_ATTRS
    role_var = _role_var(line) if line.take("for") else ()
    source = _source(line.comment) if line.comment else NO_SOURCE
    return Operator(op_type, inputs, outputs, attrs, block.role, role_var, source)


def _role_var(line: Line) -> tuple[tuple[str, str], ...]:
    pairs = []
    while True:
        line.expect("(")
        param = line.name()
        line.expect(",")
        pairs.append((param, line.name()))
        line.expect(")")
        if not line.take(","):
            return tuple(pairs)


def _source(comment: str) -> Source:
    match = _COMMENT.match(comment)
    if match is None:
        return NO_SOURCE
    part = {key: value or "" for key, value in match.groupdict().items()}
    line = int(part["line"] or 0)
    return Source(part["file"], line, part["function"], part["scope"], part["made_by"])

"""Prints programs; `parse(print_program(p)) == p` for every program.

One declaration or operator a line. A type is printed once, at the first line that names the
variable; a write without a type is an update in place. Attributes are sorted. `^1` names a
block, `<b>` a symbolic size, `2.0:f32` a literal. An operator's role is a heading. Source lines
are comments, on request.
"""

import json
from collections.abc import Iterator

from jaxfleet.ir.dims import Dim
from jaxfleet.ir.names import is_plain
from jaxfleet.ir.program import Block, Operands, Operator, Program, Role
from jaxfleet.ir.types import Constant, Kind, Variable
from jaxfleet.ir.values import Attr, Attrs, BlockRef, Literal, Operand, Struct, Word


def print_program(program: Program, *, source: bool = False) -> str:
    """Returns a program's text, without a line break at its end.

    Args:
        program: any program, valid or not.
        source: add the user's source lines as comments.
    """
    return "\n".join(_program_lines(program, source=source))


def print_operator(op: Operator, *, declared: Block | None = None) -> str:
    """Returns one operator's line.

    Args:
        op: the operator.
        declared: the block whose types to print with the outputs; none unless given.
    """
    types = declared.variables if declared else {}
    new = {name for name in op.writes if name in types}
    return _operator_line(op, {name: types[name] for name in new})


def name_text(name: str) -> str:
    """Returns a name as it prints: bare where it can be, else quoted."""
    return name if is_plain(name) else json.dumps(name)


def operand_text(operand: Operand) -> str:
    """Returns an operand as it prints."""
    return name_text(operand) if isinstance(operand, str) else str(operand)


def variable_text(variable: Variable) -> str:
    """Returns a variable with its type: `x: f32[b,784]`."""
    return f"{name_text(variable.name)}: {variable.type}"


def attrs_text(attrs: Attrs) -> str:
    """Returns attributes in braces, sorted: `{axis=0, by=0.5}`."""
    return "{" + ", ".join(f"{name_text(k)}={attr_text(v)}" for k, v in attrs.items()) + "}"


def attr_text(value: Attr) -> str:
    """Returns one attribute as it prints."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case int() | Word() | BlockRef() | Literal():
            return str(value)
        case float():
            return repr(value)
        case str():
            return json.dumps(value)
        case Dim():
            return f"<{value}>"
        case Struct():
            return value.name + attrs_text(value.fields)
        case tuple():
            return "[" + ", ".join(map(attr_text, value)) + "]"


def _program_lines(program: Program, *, source: bool) -> Iterator[str]:
    facts = f" {attrs_text(program.attrs)}" if program.attrs else ""
    yield f"program {name_text(program.name)}{facts}"
    for variable in program.variables.values():
        yield f"  {_declaration(variable)}"
    for block in program.blocks:
        yield from _block_lines(block, source=source)


def _declaration(variable: Variable) -> str:
    text = f"{variable.kind.value:<5} {variable_text(variable)}"
    if variable.constant is not None:
        text += f" = @{_constant_text(variable.constant)}"
    return text


def _constant_text(constant: Constant) -> str:
    return constant.digest


def _block_lines(block: Block, *, source: bool) -> Iterator[str]:
    yield f"  {_block_heading(block)}"
    pending = {name: v for name, v in block.variables.items() if name not in block.args}
    for variable in _read_before_written(block):
        yield f"    {_declaration(pending.pop(variable.name))}"
    role: Role | None = None
    for op in block.ops:
        if op.role is not role:
            role = op.role
            yield f"    {role.value}"
        line = _operator_line(op, pending)
        comment = op.source.comment() if source else ""
        yield f"      {line}  # {comment}" if comment else f"      {line}"


def _block_heading(block: Block) -> str:
    text = f"block {block.index}"
    if block.index and block.parent:
        text += f" in {block.parent}"
    if block.args or block.results:
        args = ", ".join(variable_text(block.variables[name]) for name in block.args)
        results = ", ".join(map(operand_text, block.results))
        text += f" ({args}) -> ({results})"
    return text


def _read_before_written(block: Block) -> list[Variable]:
    """Returns variables whose first mention is not a write of `temp` kind, in order."""
    written: set[str] = set(block.args)
    for op in block.ops:
        written.update(name for name in op.writes if name in block.variables)
    first = set(block.args)
    early: dict[str, Variable] = {}
    for op in block.ops:
        for name in op.reads:
            if name not in first and name in block.variables:
                early.setdefault(name, block.variables[name])
        first.update(op.writes)
    for name, variable in block.variables.items():
        if name not in written or (variable.kind is not Kind.TEMP and name not in block.args):
            early.setdefault(name, variable)
    return list(early.values())


def _operator_line(op: Operator, pending: dict[str, Variable]) -> str:
    left = _outputs_text(op.outputs, pending)
    text = f"{left} = " if left else ""
    text += f"{name_text(op.type)}({_operands_text(op.inputs, {})})"
    if op.attrs:
        text += f" {attrs_text(op.attrs)}"
    if op.role_var:
        pairs = ", ".join(f"({name_text(p)}, {name_text(g)})" for p, g in op.role_var)
        text += f" for {pairs}"
    return text


def _outputs_text(outputs: Operands, pending: dict[str, Variable]) -> str:
    return _operands_text(outputs, pending)


def _operands_text(operands: Operands, pending: dict[str, Variable]) -> str:
    parts = []
    for slot, items in operands.slots:
        texts = [_maybe_typed(item, pending) for item in items]
        if not slot:
            parts.extend(texts)
        elif len(texts) == 1:
            parts.append(f"{name_text(slot)}={texts[0]}")
        else:
            parts.append(f"{name_text(slot)}=[{', '.join(texts)}]")
    return ", ".join(parts)


def _maybe_typed(item: Operand, pending: dict[str, Variable]) -> str:
    variable = pending.pop(item, None) if isinstance(item, str) else None
    return variable_text(variable) if variable is not None else operand_text(item)

"""Prints programs; `parse(print_program(p)) == p` for every program.

One declaration or operator per line, under its program, block and role::

    program NAME {fact=value, ...}
      KIND NAME: TYPE                              data, param, state, const or temp
      const NAME: TYPE = @DIGEST                   or [VALUE, ...], where they are few
      block N in PARENT (NAME: TYPE, ...) -> (RESULT, ...)
        ROLE
          NAME: TYPE, SLOT=NAME = OP(OPERAND, SLOT=[OPERAND, ...]) {attr=value} for (PARAM, GRAD)

A type is printed once, at the first line that names the variable; a write without a type is an
update in place. Attributes are sorted. `^1` names a block, `<b>` a symbolic size, `2.0:f32` a
literal. Any other name is quoted. `#` starts a comment; source lines are printed as comments, on
request.
"""

import json
from collections.abc import Iterator

from jaxfleet.ir.attributes import Attr, Attrs, BlockRef, Literal, Operand, Struct, Word
from jaxfleet.ir.dims import Dim
from jaxfleet.ir.naming import name_text as name_text  # noqa: PLC0414  # other printers use it
from jaxfleet.ir.program import Block, Operands, Operator, Program, Role
from jaxfleet.ir.variable import Kind, Variable, inline_values


def print_program(program: Program, *, source: bool = False) -> str:
    """Returns the text of any program, valid or not, without a trailing line break.

    With `source`, the user's source lines are added as comments.
    """
    return "\n".join(_program_lines(program, source=source))


def print_operator(op: Operator, *, declared: Block | None = None) -> str:
    """Returns one operator's line; with the types of its outputs, as a block declares them."""
    types = declared.variables if declared else {}
    return operator_text(op, {name: types[name] for name in op.writes if name in types})


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
            return (name_text(value.name) if value.name else "") + attrs_text(value.fields)
        case tuple():
            return "[" + ", ".join(map(attr_text, value)) + "]"


def program_heading(program: Program) -> str:
    """Returns a program's first line."""
    facts = f" {attrs_text(program.attrs)}" if program.attrs else ""
    return f"program {name_text(program.name)}{facts}"


def declaration_text(variable: Variable) -> str:
    """Returns the line that declares a variable: `param w: f32[784,128]`."""
    text = f"{variable.kind.value:<5} {variable_text(variable)}"
    if variable.constant is None:
        return text
    values = inline_values(variable)
    if values is not None:
        return f"{text} = {attr_text(values)}"
    return f"{text} = @{name_text(variable.constant.digest)}"


def block_heading(block: Block, pending: dict[str, Variable]) -> str:
    """Returns the line that opens a block; removes variables printed there from `pending`."""
    text = f"block {block.index}"
    if block.parent != (0 if block.index else -1):
        text += f" in {block.parent}"
    if block.args or block.results:
        args = ", ".join(_maybe_typed(name, pending) for name in block.args)
        results = ", ".join(map(operand_text, block.results))
        text += f" ({args}) -> ({results})"
    return text


def operator_text(op: Operator, pending: dict[str, Variable]) -> str:
    """Returns an operator's line, with the types of those outputs that have none yet.

    Removes the printed variables from `pending`.
    """
    left = _operands_text(op.outputs, pending)
    text = f"{left} = " if left else ""
    text += f"{name_text(op.type)}({_operands_text(op.inputs, {})})"
    if op.attrs:
        text += f" {attrs_text(op.attrs)}"
    if op.role_var:
        pairs = ", ".join(f"({name_text(p)}, {name_text(g)})" for p, g in op.role_var)
        text += f" for {pairs}"
    return text


def commented_text(op: Operator, pending: dict[str, Variable], *, source: bool) -> str:
    """Returns an operator's line as `operator_text` does, with its source line on request."""
    line = operator_text(op, pending)
    comment = op.source.comment() if source else ""
    return f"{line}  # {comment}" if comment else line


def declared_first(block: Block) -> list[Variable]:
    """Returns the block's variables that no argument or output can declare, in order.

    These are read before they are written, are never written, or have more attributes than a type.
    """
    written = set(block.args)
    early: dict[str, Variable] = {}
    for op in block.ops:
        for name in op.reads:
            if name not in written and name in block.variables:
                early.setdefault(name, block.variables[name])
        written.update(op.writes)
    for name, variable in block.variables.items():
        if name not in written or variable.kind is not Kind.TEMP or variable.constant is not None:
            early.setdefault(name, variable)
    return list(early.values())


def _program_lines(program: Program, *, source: bool) -> Iterator[str]:
    yield program_heading(program)
    for variable in program.variables.values():
        yield f"  {declaration_text(variable)}"
    for block in program.blocks:
        yield from _block_lines(block, source=source)


def _block_lines(block: Block, *, source: bool) -> Iterator[str]:
    early = declared_first(block)
    pending = dict(block.variables)
    for variable in early:
        del pending[variable.name]
    yield f"  {block_heading(block, pending)}"
    for variable in early:
        yield f"    {declaration_text(variable)}"
    role: Role | None = None
    for op in block.ops:
        if op.role is not role:
            role = op.role
            yield f"    {role.value}"
        yield f"      {commented_text(op, pending, source=source)}"


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

"""Finds, deletes and prints operators of fluid programs."""

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.block import Block
from jaxfleet.fluid.operator import ROLE, ROLE_VAR, Operator
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.variable import Variable

_NOT_SHOWN = (ROLE_VAR, "op_callstack")


def delete_ops(block: Block, ops: Iterable[Operator]) -> None:
    """Removes operators from a block.

    Raises:
        ProgramError: one of them is not there; none is removed then.
    """
    wanted = list(ops)
    strange = [op for op in wanted if not any(op is known for known in block.ops)]
    if strange:
        raise ProgramError(f"block {block.idx} has no such operator", op=strange[0])
    for op in wanted:
        block._remove_op(next(at for at, known in enumerate(block.ops) if known is op))


def find_op_by_input_arg(block: Block, arg_name: str) -> int:
    """Returns the place of the first operator that reads a variable; -1 for none."""
    return _find(range(len(block.ops)), [arg_name in op.input_arg_names for op in block.ops])


def find_op_by_output_arg(block: Block, arg_name: str, reverse: bool = False) -> int:
    """Returns the place of the first operator that writes a variable; -1 for none.

    Args:
        block: where.
        arg_name: the variable's name.
        reverse: the last one instead.
    """
    places = range(len(block.ops))
    found = [arg_name in op.output_arg_names for op in block.ops]
    return _find(reversed(places) if reverse else places, found)


def program_to_code(
    prog: Program, fout: TextIO | None = None, skip_op_callstack: bool = True
) -> None:
    """Prints a program.

    Args:
        prog: it.
        fout: where to; the standard output, unless given.
        skip_op_callstack: leave out the line of the script that each operator comes from.
    """
    for block in prog.blocks:
        block_to_code(block, block.idx, fout, skip_op_callstack)


def block_to_code(
    block: Block,
    block_idx: int,
    fout: TextIO | None = None,
    skip_op_callstack: bool = False,
) -> None:
    """Prints a block."""
    lines = [f"{{ // block {block_idx}"]
    lines += [f"    {variable_to_code(variable)}" for variable in block.vars.values()]
    lines += [f"    {op_to_code(op, skip_op_callstack)}" for op in block.ops]
    (sys.stdout if fout is None else fout).write("\n".join([*lines, "}", ""]))


def op_to_code(op: Operator, skip_op_callstack: bool = True) -> str:
    """Returns an operator as a line of text."""
    shown = {name: value for name, value in op.all_attrs().items() if name not in _NOT_SHOWN}
    attrs = ", ".join(f"{name} = {_shown(value)}" for name, value in sorted(shown.items()))
    about = f", {ROLE_VAR} = {op.attr(ROLE_VAR)}" if op.attr(ROLE_VAR) else ""
    where = "" if skip_op_callstack else f"  // {op.source.where()}"
    return f"{op} [{ROLE} = {op.attr(ROLE)}{about}] {{{attrs}}}{where}"


def variable_to_code(var: Variable) -> str:
    """Returns a variable as a line of text."""
    return f"{var} ({var.type})"


def _find(places: Iterable[int], found: Sequence[bool]) -> int:
    return next((place for place in places if found[place]), -1)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_shown(one) for one in value)}]" if _has_block(value) else str(value)
    return f"block {value.idx}" if isinstance(value, Block) else str(value)


def _has_block(values: list[object]) -> bool:
    return any(isinstance(one, Block) for one in values)

"""Copies of programs, quick for large ones, and what one program says of another's variables."""

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from jaxfleet.fluid.operator import ROLE
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.variable import Variable

if TYPE_CHECKING:
    from jaxfleet.fluid.block import Block
    from jaxfleet.fluid.program import Program

_NOT_FOR_TEST = OpRole.BACKWARD | OpRole.OPTIMIZE


def copied(program: "Program") -> "Program":
    """Returns a program of its own: blocks, variables, parameters, operators with their lines."""
    made = copy.copy(program)
    for name, value in vars(program).items():
        if isinstance(value, list | dict):
            setattr(made, name, value.copy())
    made.blocks = [block._copied(made) for block in program.blocks]
    inner = {id(old): new for old, new in zip(program.blocks, made.blocks, strict=True)}
    for block in made.blocks:
        for parameter in block.all_parameters():
            rates = parameter.optimize_attr.items()
            parameter.optimize_attr = {k: _own(block, value) for k, value in rates}
        for op in block.ops:
            for name, value in op.attrs.items():
                if id(value) in inner:
                    op.attrs[name] = inner[id(value)]
                elif isinstance(value, list) and value and id(value[0]) in inner:
                    op.attrs[name] = [inner[id(block)] for block in value]
    return made


def _own(block: "Block", value: Any) -> Any:
    """Returns a block's variable in the place of another program's of its name."""
    return block.vars.get(value.name, value) if isinstance(value, Variable) else value


def without_backward(program: "Program") -> "Program":
    """Takes gradients and updates out of a program, and what only they used; returns it."""
    for block in program.blocks:
        block.ops = [op for op in block.ops if not op.attrs[ROLE] & _NOT_FOR_TEST]
    used = {
        name
        for block in program.blocks
        for op in block.ops
        for name in (*op.input_arg_names, *op.output_arg_names)
    }
    for block in program.blocks:
        kept = {v.name for v in block.vars.values() if v.persistable or v.is_data}
        drop_unused(block, used | kept)
    program.version += 1
    return program


def drop_unused(block: "Block", used: Collection[str]) -> None:
    """Takes the variables out of a block that are not among those that are used."""
    block.vars = {name: v for name, v in block.vars.items() if name in used}


def copy_parameter_info(source: "Program", target: "Program") -> None:
    """Makes a program's variables parameters where another has parameters of their names."""
    for known in source.all_parameters():
        block = target.block(known.block.idx)
        variable = block.vars.get(known.name)
        if variable is None:
            continue  # it was pruned
        made = known._copied(block)
        made.sizes, made.dtype, made.type = variable.sizes, variable.dtype, variable.type
        block.vars[known.name] = made
    target.version += 1


def copy_data_info(source: "Program", target: "Program", blocks: Mapping[int, int]) -> None:
    """Makes a program's variables data where another has data of their names.

    Args:
        source: the other.
        target: it; changed.
        blocks: the source's block of each of the target's blocks, where it is not the same.
    """
    for block in target.blocks:
        outer = source.block(blocks.get(block.idx, block.idx))
        for name, variable in block.vars.items():
            known = outer.vars.get(name)
            if known is not None and known.is_data:
                variable.is_data, variable.need_check_feed = True, known.need_check_feed
    target.version += 1

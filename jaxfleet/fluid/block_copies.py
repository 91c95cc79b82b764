"""Copies of sub-blocks for gradient operators, whose variables are all the copy's own."""

from collections.abc import Mapping
from typing import Any

from jaxfleet.fluid.block import Block
from jaxfleet.fluid.operator import ROLE, ROLE_VAR, Operator
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.trip_counts import most_trips
from jaxfleet.fluid.variable import Variable
from jaxfleet.ops.fluid import RANDOM_OPS, schema_of
from jaxfleet.ops.fluid.random import DRAWS_AS


def block_attributes(op: Operator, ended: frozenset[str]) -> dict[str, Any]:
    """Returns what the gradient operator of one with a sub-block says of its copy.

    Args:
        op: the operator.
        ended: names at which gradients end.
    """
    schema = schema_of(op.type)
    assert schema is not None
    copy, names = _copied(op, ended)
    read = [name for slot in schema.inputs for name in op.input(slot.name)]
    written = [name for slot in schema.outputs for name in op.output(slot.name)]
    attrs: dict[str, Any] = {
        "sub_block": copy,
        "reads": [names.get(name, name) for name in read],
        "writes": [names.get(name, name) for name in written],
    }
    return {**attrs, "max_trips": most_trips(op) or 0} if op.type == "while" else attrs


def _copied(op: Operator, ended: frozenset[str]) -> tuple[Block, dict[str, str]]:
    """Returns a copy of an operator's block, and its names for variables around the block."""
    inner: Block = op.attrs["sub_block"]
    made = _copy_of(inner, op.block.idx)
    outer = {*op.input_arg_names, *op.output_arg_names}
    names = {name: f"{name}@BLOCK{made.idx}" for name in outer if not inner.has_var(name)}
    for name, own in names.items():
        like = op.block._find_var_recursive(name)
        if like is not None:
            _declare(made, own, like)
    _rename(made, names)
    _end_gradients(made, {names.get(name, name) for name in ended})
    return made, names


def _copy_of(block: Block, parent: int) -> Block:
    """Returns a copy of a block and of those in it, whose operators are of backward."""
    program = block.program
    here = program.current_block_idx
    made = program._create_block(parent)
    program.current_block_idx = here
    made.vars = {name: v._copied(made) for name, v in block.vars.items()}
    for at, op in enumerate(block.ops):
        if op.type in RANDOM_OPS and not op.attr("seed"):
            op.attrs.setdefault(DRAWS_AS, (1 << 20) + (block.idx << 10) + at)
        own = op._copied(made)
        if op.type == "print":  # what was printed by the block itself
            own = Operator(made, "assign", {"X": op.input("In")}, op.outputs, {}, op.source)
        own.attrs[ROLE], own.attrs[ROLE_VAR] = OpRole.BACKWARD, []
        if "sub_block" in own.attrs:
            own.attrs["sub_block"] = _copy_of(own.attrs["sub_block"], made.idx)
        if op.type == "while":
            own.attrs["max_trips"] = most_trips(op) or 0
        made.ops.append(own)
    return made


def _declare(block: Block, name: str, like: Variable) -> None:
    made = block.create_var(name=name, dtype=like.dtype, stop_gradient=like.stop_gradient)
    made.type, made.sizes, made.lod_level = like.type, like.sizes, like.lod_level


def _rename(block: Block, names: Mapping[str, str]) -> None:
    """Renames what operators of a block, and of those in it, read and write."""
    for op in block.ops:
        op.inputs = {slot: [names.get(n, n) for n in many] for slot, many in op.inputs.items()}
        op.outputs = {slot: [names.get(n, n) for n in many] for slot, many in op.outputs.items()}
        for inner in op._inner_blocks():
            _rename(inner, names)


def _end_gradients(block: Block, ended: set[str]) -> None:
    """Adds an operator behind each that writes a variable at which gradients end."""
    made: list[Operator] = []
    for op in block.ops:
        made.append(op)
        for inner in op._inner_blocks():
            _end_gradients(inner, ended)
        for name in dict.fromkeys(op.output_arg_names):
            variable = block._find_var_recursive(name)
            if variable is None or not variable.dtype.startswith(("float", "bfloat")):
                continue
            if variable.stop_gradient or name in ended:
                attrs = {ROLE: OpRole.BACKWARD, ROLE_VAR: []}
                slots = {"X": [name]}, {"Out": [name]}
                made.append(Operator(block, "stop_gradient", *slots, attrs, op.source))
    block.ops = made

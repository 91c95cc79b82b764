"""From a fluid program to the IR, where everything that runs or rewrites it is."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxfleet.fluid.dtypes import VarType, ir_dtype
from jaxfleet.fluid.operator import DEVICE, NAME_SCOPE, ROLE, ROLE_VAR, Operator
from jaxfleet.fluid.roles import ir_role
from jaxfleet.fluid.variable import Parameter, Variable
from jaxfleet.ir import Attrs, Block, BlockRef, Kind, Operands, Program
from jaxfleet.ir import Operator as IrOperator
from jaxfleet.ir import Variable as IrVariable
from jaxfleet.ir.types import RAW
from jaxfleet.ops.fluid import EMPTY, UNWANTED

if TYPE_CHECKING:
    from jaxfleet.fluid.block import Block as FluidBlock
    from jaxfleet.fluid.program import Program as FluidProgram

_NOT_OF_THE_IR = (ROLE, ROLE_VAR, DEVICE)
_NO_SCOPE = "/"


def ir_program(
    program: "FluidProgram", *, name: str = "main", fetch: Iterable[str] = ()
) -> Program:
    """Returns a fluid program as the IR has it: the same operators, slots and names.

    Args:
        program: it.
        name: what it prints under.
        fetch: names that an operator at the end marks as wanted.
    """
    outer = {v.name: _variable(v) for v in program.list_vars() if _is_outer(v)}
    blocks = [_block(block) for block in program.blocks]
    wanted = tuple(fetch)
    if wanted:
        marked = IrOperator("fetch", Operands.of(*wanted))
        blocks[0] = blocks[0].with_ops((*blocks[0].ops, marked))
    return Program(name, outer, tuple(blocks), Attrs(program._facts))


def ir_operator(op: Operator) -> IrOperator:
    """Returns a fluid operator as the IR has it, with its slots in the order of their names."""
    pairs = op.attrs.get(ROLE_VAR) or []
    attrs = {k: _attr(v) for k, v in op.attrs.items() if _is_of_the_ir(k, v)}
    if unwanted := _unwanted(op.outputs):
        attrs[UNWANTED] = unwanted
    return IrOperator(
        op.type,
        _operands(op.inputs),
        _operands(op.outputs),
        Attrs(attrs),
        ir_role(op.attrs.get(ROLE, 0)),
        tuple(zip(pairs[::2], pairs[1::2], strict=True)),
        op.source,
    )


def _operands(slots: Mapping[str, list[str]]) -> Operands:
    kept = {slot: tuple(n for n in slots[slot] if n != EMPTY) for slot in sorted(slots)}
    return Operands((slot, names) for slot, names in kept.items() if names)


def _unwanted(slots: Mapping[str, list[str]]) -> tuple[tuple[str, int], ...]:
    """Returns the places of outputs that are not wanted, beside others of their slots that are."""
    return tuple(
        (slot, at)
        for slot in sorted(slots)
        for at, name in enumerate(slots[slot])
        if name == EMPTY and any(other != EMPTY for other in slots[slot])
    )


def _is_of_the_ir(name: str, value: Any) -> bool:
    return name not in _NOT_OF_THE_IR and (name, value) != (NAME_SCOPE, _NO_SCOPE)


def _attr(value: Any) -> Any:
    from jaxfleet.fluid.block import Block as FluidBlock  # noqa: PLC0415  # blocks are made of these

    if isinstance(value, list | tuple):
        return tuple(map(_attr, value))
    return BlockRef(value.idx) if isinstance(value, FluidBlock) else value


def _block(block: "FluidBlock") -> Block:
    inner = {v.name: _variable(v) for v in block.vars.values() if not _is_outer(v)}
    ops = tuple(ir_operator(op) for op in block.ops)
    return Block(block.idx, block.parent_idx, inner, ops=ops)


def _is_outer(variable: Variable) -> bool:
    return variable.persistable or variable.is_data


def _variable(variable: Variable) -> IrVariable:
    kind = Kind.TEMP
    if variable.is_data:
        kind = Kind.DATA
    elif isinstance(variable, Parameter):
        kind = Kind.PARAM
    elif variable.persistable:
        kind = Kind.STATE
    dtype = RAW if variable.type == VarType.RAW else ir_dtype(variable.dtype)
    return IrVariable(variable.name, dtype, variable.sizes or (), kind)

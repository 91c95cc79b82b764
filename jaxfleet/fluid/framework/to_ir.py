"""Conversion of a fluid program to the IR, and shape inference of its operators by tracing.

An unknown size is a letter. Each letter is traced with two numbers, and an axis of a result that
grows with one becomes a size in that letter; so `reshape` and `concat` need no rules of their own.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxfleet.errors import JaxfleetError, ProgramError
from jaxfleet.fluid.framework.operator import DEVICE, NAME_SCOPE, ROLE, ROLE_VAR, Operator, ir_role
from jaxfleet.fluid.framework.types import VarType, ir_dtype
from jaxfleet.fluid.framework.variable import Parameter, Variable
from jaxfleet.ir import Attrs, Block, BlockRef, Kind, Operands, Program, Size, evaluate
from jaxfleet.ir import Operator as IrOperator
from jaxfleet.ir import Variable as IrVariable
from jaxfleet.ir.dims import letter, letters
from jaxfleet.ir.variable import RAW
from jaxfleet.ops import Interpreter, find_op
from jaxfleet.ops.fluid import EMPTY, UNWANTED
from jaxfleet.ops.fluid.arrays import device_dtype

# Values for letters: two that most factors divide, two that large windows fit, and two for a
# `reshape` into groups of 5, 7 or 11.
_TRIED = ((24, 48), (24 << 6, 48 << 6), (24 * 1155, 48 * 1155))

# Suffix of the letter of a size that is not a multiple of another: rows in groups of five.
UNKNOWN = "_part"


def infer_sizes(op: IrOperator, read: Mapping[str, Variable]) -> list[tuple[Size, ...]]:
    """Returns the sizes of an operator's outputs, in the order of its operands.

    The operator has no sub-blocks, and names as operands. Raises ProgramError if it rejects the
    shapes of its inputs.
    """
    known = {name: variable.sizes for name, variable in read.items()}
    if any(sizes is None for sizes in known.values()):
        unknown = next(name for name, sizes in known.items() if sizes is None)
        raise ProgramError(f"the shape of '{unknown}' is not known", op=op)
    found = sorted(letters(tuple(s for sizes in known.values() for s in sizes or ())))
    try:
        return _sizes(op, read, found, {})
    except ProgramError:
        for tried in _TRIED[1:]:
            with contextlib.suppress(ProgramError):
                return _sizes(op, read, found, {}, tried)
        numbers = {s for sizes in known.values() for s in sizes or () if isinstance(s, int)}
        for fixed in ({name: number} for name in found for number in sorted(numbers, reverse=True)):
            with contextlib.suppress(ProgramError):
                return _sizes(op, read, found, fixed)
        raise


def _sizes(
    op: IrOperator,
    read: Mapping[str, Variable],
    found: Sequence[str],
    fixed: Mapping[str, int],
    tried: tuple[int, int] = _TRIED[0],
) -> list[tuple[Size, ...]]:
    """Returns the sizes of outputs, with some letters fixed to numbers.

    An unknown axis that must match a known one has its size: `[b,2]` joined with `[3,2]` along
    axis 1 has 3 rows.
    """
    usual = {**dict.fromkeys(found, tried[0]), **fixed}
    free = [name for name in found if name not in fixed]
    base = _shapes(op, read, usual)
    grown = {x: _shapes(op, read, {**usual, x: tried[1]}) for x in free}
    return [
        tuple(
            _size(base[at][axis], {x: grown[x][at][axis] for x in free}, tried)
            for axis in range(len(base[at]))
        )
        for at in range(len(base))
    ]


def _shapes(
    op: IrOperator, read: Mapping[str, Variable], numbers: Mapping[str, int]
) -> list[tuple[int, ...]]:
    meaning = find_op(op).meaning
    interpreter = Interpreter(Program(), numbers)
    given = [_like(read[name], numbers) for name in op.inputs.names]

    def run(values: Sequence[Any]) -> Sequence[Any]:
        return meaning(interpreter, op, values)

    return [made.shape for made in _traced(run, given, op, read)]


def _traced(
    run: Callable[[Sequence[Any]], Sequence[Any]],
    given: Sequence[Any],
    op: IrOperator,
    read: Mapping[str, Variable],
) -> Any:
    try:
        return jax.eval_shape(run, given)
    except JaxfleetError:
        raise
    except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        shapes = " and ".join(_shown(read[name]) for name in op.inputs.names)
        what = f"operator '{op.type}' cannot take {shapes or 'nothing'}"
        hint = f"tried with {_TRIED[0][0]} for each letter: {error}"
        raise ProgramError(what, op=op, hint=hint) from error


def _shown(variable: Variable) -> str:
    return f"'{variable.name}' [{','.join(map(str, variable.sizes or ()))}]"


def _like(variable: Variable, numbers: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    shape = tuple(evaluate(size, numbers) for size in variable.sizes or ())
    return jax.ShapeDtypeStruct(shape, device_dtype(variable.dtype))


def _size(base: int, grown: Mapping[str, int], tried: tuple[int, int]) -> Size:
    """Returns the size that is `base` at the first numbers and grows as given with each letter."""
    first, second = tried
    size: Size = base
    for name, number in grown.items():
        slope, rest = divmod(number - base, second - first)
        if rest:  # not a multiple of the letter: a new size, equivalent to unknown
            return letter(name + UNKNOWN)
        size = size + slope * letter(name) - slope * first
    return size


if TYPE_CHECKING:
    from jaxfleet.fluid.framework.block import Block as FluidBlock
    from jaxfleet.fluid.framework.program import Program as FluidProgram

_NOT_OF_THE_IR = (ROLE, ROLE_VAR, DEVICE)
_NO_SCOPE = "/"


def ir_program(
    program: "FluidProgram", *, name: str = "main", fetch: Iterable[str] = ()
) -> Program:
    """Converts a fluid program to the IR, with the same operators, slots and names.

    An operator at the end marks the names in `fetch`.
    """
    outer = {v.name: _variable(v) for v in program.list_vars() if _is_outer(v)}
    blocks = [_block(block) for block in program.blocks]
    wanted = tuple(fetch)
    if wanted:
        marked = IrOperator("fetch", Operands.of(*wanted))
        blocks[0] = blocks[0].with_ops((*blocks[0].ops, marked))
    return Program(name, outer, tuple(blocks), Attrs(program._facts))


def ir_operator(op: Operator) -> IrOperator:
    """Converts a fluid operator to the IR, with its slots sorted by name."""
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
    """Returns the positions of unrequested outputs beside requested ones of the same slots."""
    return tuple(
        (slot, at)
        for slot in sorted(slots)
        for at, name in enumerate(slots[slot])
        if name == EMPTY and any(other != EMPTY for other in slots[slot])
    )


def _is_of_the_ir(name: str, value: Any) -> bool:
    return name not in _NOT_OF_THE_IR and (name, value) != (NAME_SCOPE, _NO_SCOPE)


def _attr(value: Any) -> Any:
    from jaxfleet.fluid.framework.block import Block as FluidBlock  # noqa: PLC0415  # blocks are made of these

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
    if isinstance(variable, Parameter):
        kind = Kind.PARAM
    elif variable.persistable:  # a fed value goes into the scope, from which a run reads it
        kind = Kind.STATE
    elif variable.is_data:
        kind = Kind.DATA
    dtype = RAW if variable.type == VarType.RAW else ir_dtype(variable.dtype)
    return IrVariable(variable.name, dtype, variable.sizes or (), kind)

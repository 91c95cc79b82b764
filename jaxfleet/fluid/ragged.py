"""Sequences of unequal lengths on a device: their rows one after the other, and their lengths.

What is declared with `lod_level=1` is fed as a LoDTensor, or as a list of sequences. On the device
it is two arrays: the rows of all sequences, `[rows, ...]`, as fluid's operators see them, and the
lengths, `i32[b]`, under the variable's name with `@LENGTHS`.

How many rows there are is a size with a letter of the variable's own. Shape inference carries
letters, so whatever has as many rows as a variable has its sequences too, and no operator needs a
rule for that: an embedding of words, an `fc` of that, and the gradients of both. The operators
that need to know where sequences end (`sequence_pool`) have a slot of ours beside fluid's,
`XLengths`. A program under construction leaves it empty; `with_lengths` fills it where a program
is made ready to run.

Two that an operator reads side by side, row by row, have as many rows, and share the letter of one
(`join_rows`); they are fed with equal lengths.

Each number of rows would be a program of its own to XLA. So rows are added, copies of the last,
up to the next of a few numbers, wherever that changes no result (`ragged_values`): where all that
reads the rows works row by row or knows the lengths. A `mean` over the words of a batch does
not, and such a program is compiled for each number of rows. What is fetched has its own rows only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from jaxfleet.fluid.variable import Variable
from jaxfleet.ir import Block, Kind, Operands
from jaxfleet.ir import Operator as IrOperator
from jaxfleet.ir import Program as IrProgram
from jaxfleet.ir import Variable as IrVariable
from jaxfleet.ir.dims import letter, substitute
from jaxfleet.ops.fluid import schema_of

if TYPE_CHECKING:
    from jaxfleet.fluid.program import Program

T = TypeVar("T")

_LENGTHS = "@LENGTHS"
_SLOT = "Lengths"  # ends the name of a slot for the lengths of what is in another: XLengths


def lengths_of(name: str) -> str:
    """Returns the name of what holds the lengths of a variable's sequences."""
    return name + _LENGTHS


def source_of(variable: Variable, ragged: Mapping[str, T]) -> T | None:
    """Returns what was fed as sequences that a variable has too; None where it has none.

    Args:
        variable: of the program.
        ragged: what is fed as sequences, or its name, by the letter that is its number of rows.
    """
    return ragged.get(str(variable.sizes[0])) if variable.sizes else None


def ragged_data(program: "Program") -> dict[str, Variable]:
    """Returns what a program is fed as sequences, by the letter that is its number of rows."""
    return {rows: data[0] for rows, data in data_by_rows(program).items()}


def data_by_rows(program: "Program") -> dict[str, list[Variable]]:
    """Returns what a program is fed as sequences of equal lengths, by their number of rows."""
    found: dict[str, list[Variable]] = {}
    for variable in program.global_block().vars.values():
        if variable.is_data and variable.lod_level and variable.sizes:
            found.setdefault(str(variable.sizes[0]), []).append(variable)
    return found


def join_rows(program: "Program", variables: Iterable[Variable]) -> bool:
    """Declares that the sequences of some variables have equal lengths; False if there is but one.

    An operator that works row by row on two of them (a sum of embeddings of words and of their
    contexts) implies it. Fluid finds out when it runs; here it is checked when they are fed.
    """
    ragged = ragged_data(program)
    rows = [v.sizes[0] for v in variables if v.sizes and source_of(v, ragged) is not None]
    first, *others = dict.fromkeys(rows) or [0]
    if not others:
        return False
    same = {str(other): first for other in others}
    for block in program.blocks:
        for variable in block.vars.values():
            if variable.sizes is not None:
                variable.sizes = tuple(substitute(size, same) for size in variable.sizes)
    program.version += 1
    return True


def with_lengths(made: IrProgram, program: "Program") -> IrProgram:
    """Gives operators the lengths of the sequences that they work on.

    Args:
        made: the program in the IR.
        program: what it was made of.
    """
    ragged = ragged_data(program)
    if not ragged:
        return made
    names = {rows: lengths_of(variable.name) for rows, variable in ragged.items()}
    blocks = tuple(_with_lengths(made, block, names) for block in made.blocks)
    used = {name for block in blocks for op in block.ops for name in op.reads} & {*names.values()}
    added = {name: IrVariable(name, "i32", (letter("b"),), Kind.DATA) for name in sorted(used)}
    return replace(made, variables={**made.variables, **added}, blocks=blocks)


def _with_lengths(made: IrProgram, block: Block, names: Mapping[str, str]) -> Block:
    def filled(op: IrOperator) -> IrOperator:
        slots = [name for name in slots_for_lengths(op.type) if not op.inputs.slot(name)]
        given = {slot: _lengths(op, slot) for slot in slots}
        more = [(slot, (name,)) for slot, name in given.items() if name is not None]
        return replace(op, inputs=Operands((*op.inputs.slots, *more))) if more else op

    def _lengths(op: IrOperator, slot: str) -> str | None:
        operands = op.inputs.slot(slot.removesuffix(_SLOT))
        found = operands and _declared(made, block, str(operands[0]))
        return names.get(str(found.shape[0])) if found and found.shape else None

    return block.with_ops([filled(op) for op in block.ops])


def _declared(program: IrProgram, block: Block, name: str) -> IrVariable | None:
    scopes = (block.variables, program.root.variables, program.variables)
    return next((scope[name] for scope in scopes if name in scope), None)


def slots_for_lengths(op_type: str) -> list[str]:
    """Returns the slots of an operator type that take lengths."""
    schema = schema_of(op_type)
    return [s.name for s in schema.inputs if s.name.endswith(_SLOT)] if schema else []

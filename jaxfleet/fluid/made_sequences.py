"""Sequences that operators make: of other lengths than what was fed (`sequence_slice`).

Their operator has an output slot of ours, `OutLengths`, for the lengths; a program under
construction leaves it empty, as it does the slots that take lengths. Whatever has as many rows has
the same sequences, so there are as many rows as nothing else has: where no size of the inputs'
tells them apart (a slice of `x` has at most the rows of `x`), some rows are spare, and belong to no
sequence. Spare rows show as a number in the size: `x_rows+1`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.variable import Variable
from jaxfleet.ir import Size, evaluate
from jaxfleet.ir.dims import Dim
from jaxfleet.ops.fluid import schema_of

if TYPE_CHECKING:
    from jaxfleet.fluid.program import Program

OUT_LENGTHS = "OutLengths"


def made_sequences(program: "Program") -> Iterator[tuple[Operator, Variable]]:
    """Yields the operators that make sequences of lengths of their own, each with what it makes."""
    for block in program.blocks:
        for op in block.ops:
            if makes_lengths(op.type):
                yield op, block._var_recursive(op.output("Out")[0])


def makes_lengths(op_type: str) -> bool:
    """Whether operators of a type say the lengths of what they make."""
    schema = schema_of(op_type)
    return schema is not None and any(slot.name == OUT_LENGTHS for slot in schema.outputs)


def spare_rows(size: Size) -> int:
    """Returns how many of so many rows are spare whatever is fed."""
    return evaluate(size, dict.fromkeys(size.letters, 0)) if isinstance(size, Dim) else 0


def told_apart(program: "Program", size: Size) -> int:
    """Returns how many spare rows tell sequences of at most so many rows from all others."""
    taken = {spare_rows(made.sizes[0]) for _, made in made_sequences(program) if made.sizes}
    here = spare_rows(size)
    return next(more for more in range(1, len(taken) + 2) if here + more not in taken)

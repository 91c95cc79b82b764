"""Operators with sub-blocks are given what their blocks read besides what layers know of.

Lengths of sequences and the number of the run are added where a program is made ready to run, to
the operators that read them; an operator around those reads them too.
"""

from dataclasses import replace

from jaxfleet.analysis.uses import OuterUses
from jaxfleet.fluid.ragged import lengths_of, source_name
from jaxfleet.ir import Attrs, Kind, Operands, Operator, Program
from jaxfleet.ops.fluid import schema_of
from jaxfleet.ops.fluid.control import BESIDE


def closed(program: Program) -> Program:
    """Returns a program whose operators list all data that their sub-blocks read."""
    if len(program.blocks) == 1:
        return program
    blocks = list(program.blocks)
    for index in range(len(blocks) - 1, -1, -1):  # inner blocks come after those around them
        uses = OuterUses(program.with_blocks(blocks))
        ops = [_closed(program, uses, op) for op in blocks[index].ops]
        blocks[index] = blocks[index].with_ops(ops)
    return program.with_blocks(blocks)


def _closed(program: Program, uses: OuterUses, op: Operator) -> Operator:
    schema = schema_of(op.type)
    if not op.blocks or schema is None or all(slot.name != BESIDE for slot in schema.inputs):
        return op
    listed = () if "reads" in op.attrs else op.reads
    inner = {name for index in op.blocks for name in uses.of_block(index).reads}
    data = {v.name for v in program.of_kind(Kind.DATA)}
    beside = {name for name in inner if name in data or name == lengths_of(source_name(name))}
    more = tuple(sorted(beside - {*listed}))
    if not more:
        return op
    inputs = Operands((*op.inputs.slots, (BESIDE, more)))
    attrs = Attrs({**op.attrs, BESIDE.lower(): more}) if "reads" in op.attrs else op.attrs
    return replace(op, inputs=inputs, attrs=attrs)

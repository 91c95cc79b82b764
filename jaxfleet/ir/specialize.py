"""A program for one size of what its letters stand for."""

from collections.abc import Mapping
from dataclasses import replace

from jaxfleet.ir.dims import Dim, Size, substitute
from jaxfleet.ir.program import Block, Program
from jaxfleet.ir.types import Variable
from jaxfleet.ir.values import Attr, Attrs, map_attr


def specialize(program: Program, sizes: Mapping[str, Size]) -> Program:
    """Returns the program with letters replaced by sizes, in shapes and in attributes."""

    def leaf(attr: Attr) -> Attr:
        return substitute(attr, sizes) if isinstance(attr, Dim) else attr

    def attrs(found: Attrs) -> Attrs:
        return Attrs({key: map_attr(value, leaf) for key, value in found.items()})

    def variables(found: Mapping[str, Variable]) -> dict[str, Variable]:
        return {
            name: replace(v, shape=tuple(substitute(size, sizes) for size in v.shape))
            for name, v in found.items()
        }

    def block(found: Block) -> Block:
        ops = tuple(replace(op, attrs=attrs(op.attrs)) for op in found.ops)
        return replace(found, variables=variables(found.variables), ops=ops)

    return replace(
        program,
        attrs=attrs(program.attrs),
        variables=variables(program.variables),
        blocks=tuple(map(block, program.blocks)),
    )

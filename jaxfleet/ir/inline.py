"""Inlines one program's operators into another: renamed, renumbered, with letters bound."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from jaxfleet.ir.attributes import Attr, Attrs, BlockRef, Operand, map_attr
from jaxfleet.ir.dims import Dim, Size, substitute
from jaxfleet.ir.program import Block, Operator, Program
from jaxfleet.ir.variable import Variable


@dataclass(frozen=True)
class Embedded:
    """A program prepared for embedding in another one.

    Attributes:
        variables: those of the program, under their new names.
        root: its block 0, with the requested number and parent.
        inner: its other blocks that are used, in order.
    """

    variables: Mapping[str, Variable]
    root: Block
    inner: tuple[Block, ...]


def embed(
    program: Program,
    *,
    index: int,
    inner_from: int,
    parent: int,
    names: Mapping[str, str],
    sizes: Mapping[str, int],
) -> Embedded:
    """Prepares a program for embedding in another one.

    There its block 0 has number `index` and the enclosing block `parent`, and its other blocks are
    numbered from `inner_from` on. Variables of any block are renamed by `names`, letters replaced
    by `sizes`.
    """
    return _Embedding(program, index, inner_from, parent, names, sizes).run()


def renamed(program: Program, names: Mapping[str, str]) -> Program:
    """Returns a program with variables renamed."""
    if not names:
        return program
    made = embed(program, index=0, inner_from=1, parent=-1, names=names, sizes={})
    return replace(program, variables=made.variables, blocks=(made.root, *made.inner))


@dataclass(frozen=True)
class _Embedding:
    program: Program
    index: int
    inner_from: int
    parent: int
    names: Mapping[str, str]
    sizes: Mapping[str, int]

    def run(self) -> Embedded:
        root, *inner = (self._block(self.program.blocks[index]) for index in self._used)
        variables = map(self._variable, self.program.variables.values())
        return Embedded({v.name: v for v in variables}, root, tuple(inner))

    @cached_property
    def _used(self) -> list[int]:
        """The blocks reachable from block 0; an excerpt of a program may have lost the others."""
        found, left = {0}, [0]
        while left:
            ops = self.program.blocks[left.pop()].ops
            more = {index for op in ops for index in op.blocks} - found
            found |= more
            left += more
        return sorted(found)

    @cached_property
    def _numbers(self) -> dict[int, int]:
        rest = {index: self.inner_from + place for place, index in enumerate(self._used[1:])}
        return {-1: self.parent, 0: self.index, **rest}

    def _block(self, block: Block) -> Block:
        variables = map(self._variable, block.variables.values())
        return replace(
            block,
            index=self._numbers[block.index],
            parent=self._numbers[block.parent],
            variables={v.name: v for v in variables},
            args=tuple(self.names.get(name, name) for name in block.args),
            ops=tuple(map(self._op, block.ops)),
            results=tuple(map(self._operand, block.results)),
        )

    def _variable(self, variable: Variable) -> Variable:
        name = self.names.get(variable.name, variable.name)
        shape = tuple(substitute(size, self.sizes) for size in variable.shape)
        return replace(variable, name=name, shape=shape)

    def _operand(self, operand: Operand) -> Operand:
        return self.names.get(operand, operand) if isinstance(operand, str) else operand

    def _op(self, op: Operator) -> Operator:
        attrs = {key: map_attr(value, self._attr) for key, value in op.attrs.items()}
        return replace(
            op,
            inputs=op.inputs.renamed(self.names),
            outputs=op.outputs.renamed(self.names),
            attrs=Attrs(attrs),
        )

    def _attr(self, value: Attr) -> Attr:
        if isinstance(value, BlockRef):
            return BlockRef(self._numbers[value.index])
        return substitute(value, self.sizes) if isinstance(value, Dim) else value


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

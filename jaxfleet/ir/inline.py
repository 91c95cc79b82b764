"""Programs with other names: canonical temporaries, and one program embedded in another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from jaxfleet.ir.attributes import Attr, Attrs, BlockRef, Operand, map_attr
from jaxfleet.ir.dims import Dim, Size, substitute
from jaxfleet.ir.program import Block, Operator, Program
from jaxfleet.ir.variable import Kind, Variable


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


def with_block_numbers(op: Operator, number: Callable[[int], int]) -> Operator:
    """Returns an operator with its references to blocks renumbered."""

    def leaf(attr: Attr) -> Attr:
        return BlockRef(number(attr.index)) if isinstance(attr, BlockRef) else attr

    if not op.blocks:
        return op
    return replace(op, attrs=Attrs({key: map_attr(value, leaf) for key, value in op.attrs.items()}))


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


def equivalent(a: Program, b: Program) -> bool:
    """Whether two programs are equal up to the names of their blocks' temporaries.

    Variables of the programs themselves keep their names: they are fed, kept or fetched by name.
    """
    return canonical(a) == canonical(b)


def canonical(program: Program) -> Program:
    """Returns the program with its blocks' temporaries named `%0`, `%1`, ... in order of use."""
    names = _Names(program)
    blocks = [_renamed(block, names) for block in program.blocks]
    # A variable without uses is identified only by its type.
    for block in program.blocks:
        for variable in sorted(block.variables.values(), key=lambda variable: variable.type):
            names.of(variable.name, block)
    return program.with_blocks(
        replace(
            new,
            variables={
                names.of(name, old): replace(variable, name=names.of(name, old))
                for name, variable in old.variables.items()
            },
        )
        for old, new in zip(program.blocks, blocks, strict=True)
    )


class _Names:
    """Assigns each temporary its new name at its first use."""

    def __init__(self, program: Program) -> None:
        self._blocks = program.blocks
        self._new: dict[tuple[int, str], str] = {}
        self._count = 0

    def of(self, name: str, block: Block) -> str:
        at = block
        while name not in at.variables:
            if at.parent < 0:
                return name
            at = self._blocks[at.parent]
        if at.variables[name].kind is not Kind.TEMP:
            return name
        key = (at.index, name)
        if key not in self._new:
            self._new[key] = f"%{self._count}"
            self._count += 1
        return self._new[key]


def _renamed(block: Block, names: _Names) -> Block:
    def operand(old: Operand) -> Operand:
        return names.of(old, block) if isinstance(old, str) else old

    def operator(op: Operator) -> Operator:
        new = {name: names.of(name, block) for name in (*op.reads, *op.writes)}
        role_var = tuple((names.of(p, block), names.of(g, block)) for p, g in op.role_var)
        inputs, outputs = op.inputs.renamed(new), op.outputs.renamed(new)
        return replace(op, inputs=inputs, outputs=outputs, role_var=role_var)

    args = tuple(names.of(name, block) for name in block.args)
    ops = tuple(operator(op) for op in block.ops)
    return replace(block, args=args, ops=ops, results=tuple(map(operand, block.results)))

"""Programs with other names: canonical temporaries, and one program embedded in another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from jaxfleet.ir.attributes import Attr, Attrs, BlockRef, Operand, map_attr
from jaxfleet.ir.dims import Dim, Size, substitute
from jaxfleet.ir.program import Block, Operator, Program
from jaxfleet.ir.variable import Kind, Variable


@dataclass(frozen=True)
class Embedded:
    """A program prepared for embedding: its variables, its root, and the inner blocks in use."""

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
    sizes: Mapping[str, Size],
) -> Embedded:
    """Prepares a program for embedding in another one.

    There its block 0 has number `index` and the enclosing block `parent`, and its other blocks are
    numbered from `inner_from` on. Variables of any block are renamed by `names`, letters replaced
    by `sizes`.
    """
    used = _reachable(program)
    numbers = {-1: parent, 0: index}
    numbers |= {old: inner_from + place for place, old in enumerate(used[1:])}
    made = _Embedding(numbers, names, sizes)
    root, *inner = (made.block(program.blocks[old]) for old in used)
    return Embedded(made.variables(program.variables), root, tuple(inner))


def _reachable(program: Program) -> list[int]:
    """Returns the blocks reachable from block 0; an excerpt may have lost the others."""
    found, left = {0}, [0]
    while left:
        more = {index for op in program.blocks[left.pop()].ops for index in op.blocks} - found
        found |= more
        left += more
    return sorted(found)


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


def specialize(program: Program, sizes: Mapping[str, Size]) -> Program:
    """Returns the program with letters replaced by sizes, in shapes and in attributes."""
    made = _Embedding({n: n for n in range(-1, len(program.blocks))}, {}, sizes)
    return replace(
        program,
        attrs=made.attrs(program.attrs),
        variables=made.variables(program.variables),
        blocks=tuple(map(made.block, program.blocks)),
    )


@dataclass(frozen=True)
class _Embedding:
    """New numbers of blocks, new names of variables, and sizes of letters."""

    numbers: Mapping[int, int]
    names: Mapping[str, str]
    sizes: Mapping[str, Size]

    def block(self, block: Block) -> Block:
        return replace(
            block,
            index=self.numbers[block.index],
            parent=self.numbers[block.parent],
            variables=self.variables(block.variables),
            args=tuple(self.names.get(name, name) for name in block.args),
            ops=tuple(map(self._op, block.ops)),
            results=tuple(map(self._operand, block.results)),
        )

    def variables(self, found: Mapping[str, Variable]) -> dict[str, Variable]:
        return {new.name: new for new in map(self._variable, found.values())}

    def _variable(self, variable: Variable) -> Variable:
        name = self.names.get(variable.name, variable.name)
        shape = tuple(substitute(size, self.sizes) for size in variable.shape)
        return replace(variable, name=name, shape=shape)

    def _operand(self, operand: Operand) -> Operand:
        return self.names.get(operand, operand) if isinstance(operand, str) else operand

    def _op(self, op: Operator) -> Operator:
        inputs, outputs = op.inputs.renamed(self.names), op.outputs.renamed(self.names)
        return replace(op, inputs=inputs, outputs=outputs, attrs=self.attrs(op.attrs))

    def attrs(self, found: Attrs) -> Attrs:
        return Attrs({key: map_attr(value, self._attr) for key, value in found.items()})

    def _attr(self, value: Attr) -> Attr:
        if isinstance(value, BlockRef):
            return BlockRef(self.numbers.get(value.index, value.index))
        return substitute(value, self.sizes) if isinstance(value, Dim) else value


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

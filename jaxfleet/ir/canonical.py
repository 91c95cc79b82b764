"""Renames temporaries by their order, so that programs that differ only there become equal."""

from dataclasses import replace

from jaxfleet.ir.attributes import Operand
from jaxfleet.ir.program import Block, Operator, Program
from jaxfleet.ir.variable import Kind


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

"""Single assignment: temporaries that are written several times get one name per value."""

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import replace

from jaxfleet.analysis.flow import OuterUses
from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Operator, Program, Variable
from jaxfleet.ir.naming import unique


def rewritten_temporaries(program: Program) -> frozenset[str]:
    """Returns the temporaries that more than one operator of block 0 writes."""
    seen, again = set[str](), set[str]()
    for op in program.root.ops:
        again |= seen.intersection(op.writes)
        seen.update(op.writes)
    return frozenset(x for x in again if program.lookup(x).kind is Kind.TEMP)


def used_inside(op: Operator, uses: OuterUses) -> AbstractSet[str]:
    """Returns the variables of the enclosing block that an operator's sub-blocks use, by name."""
    inner = [uses.of_block(index) for index in op.blocks]
    return frozenset().union(*(used.reads | used.writes for used in inner))


def with_single_assignment(program: Program, names: Collection[str]) -> Program:
    """Returns a program in which each value written to these names has its own name.

    The names are temporaries of block 0 that no sub-block uses. The last value keeps the name;
    earlier ones get others: `x~1`, `x~2`.
    """
    return _Renaming(program, frozenset(names)).run() if names else program


class _Renaming:
    """Visits block 0, and names each value as it is written."""

    def __init__(self, program: Program, several: frozenset[str]) -> None:
        self.program, self.several = program, several
        self.taken = {*program.variables, *program.root.variables}
        self.now: dict[str, str] = {}  # the name of each variable's current value
        self.left = dict.fromkeys(several, 0)  # the remaining writes
        for op in program.root.ops:
            for name in several.intersection(op.writes):
                self.left[name] += 1

    def run(self) -> Program:
        ops, declared = list[Operator](), list[Variable]()
        for op in self.program.root.ops:
            inputs = op.inputs.renamed(self.now)
            new = {name: self._next(name) for name in sorted(self.several.intersection(op.writes))}
            declared += [replace(self.program.lookup(old), name=x) for old, x in new.items()]
            self.now.update(new)
            pairs = tuple((w, self.now.get(g, g)) for w, g in op.role_var)
            outputs = op.outputs.renamed(new)
            ops.append(replace(op, inputs=inputs, outputs=outputs, role_var=pairs))
        return self.program.with_block(self.program.root.with_ops(ops, declare=declared))

    def _next(self, name: str) -> str:
        self.left[name] -= 1
        made = unique(name, self.taken) if self.left[name] else name
        self.taken.add(made)
        return made


# `reads` and `writes` of these name the operands in their sub-blocks.
_NAME_THEIR_OPERANDS = frozenset({"while", "conditional_block"})


def in_single_assignment(program: Program) -> Program:
    """Returns a program in which no two operators of block 0 write one temporary.

    A loop of fluid writes initialized variables that change in its iterations: its sub-block then
    has its own variables of these names, and its operands are renamed. Such a temporary in a
    sub-block of another operator is a PassError.
    """
    several = rewritten_temporaries(program)
    program = _with_variables_of_blocks(program, several)
    uses = OuterUses(program)
    for op in program.root.ops:
        if found := sorted(used_inside(op, uses) & several):
            what = f"recompute: '{found[0]}' is written twice, and used in a sub-block"
            hint = "give the block a copy that is written once, or train without recomputation"
            raise PassError(what, op=op, hint=hint)
    return with_single_assignment(program, several)


def _with_variables_of_blocks(program: Program, several: AbstractSet[str]) -> Program:
    uses, blocks, ops = OuterUses(program), list(program.blocks), list[Operator]()
    for op in program.root.ops:
        shared = sorted(used_inside(op, uses) & several)
        if not shared or op.type not in _NAME_THEIR_OPERANDS or "reads" in op.attrs:
            ops.append(op)
            continue
        used = map(program.lookup, dict.fromkeys((*op.reads, *op.writes)))
        own = {one.name: replace(one, kind=Kind.TEMP) for one in used}
        for index in op.blocks:
            blocks[index] = replace(blocks[index], variables={**blocks[index].variables, **own})
        ops.append(replace(op, attrs=op.attrs.updated(reads=op.reads, writes=op.writes)))
    blocks[0] = program.root.with_ops(ops)
    return program.with_blocks(blocks)

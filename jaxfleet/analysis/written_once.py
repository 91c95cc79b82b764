"""Temporaries that are written several times, as several temporaries: a name for each value."""

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

from jaxfleet.analysis.uses import OuterUses
from jaxfleet.ir import Kind, Operator, Program, Variable
from jaxfleet.ir.names import unique


def written_again(program: Program) -> frozenset[str]:
    """Returns the temporaries that more than one operator of block 0 writes."""
    seen, again = set[str](), set[str]()
    for op in program.root.ops:
        again |= seen.intersection(op.writes)
        seen.update(op.writes)
    return frozenset(x for x in again if program.lookup(x).kind is Kind.TEMP)


def used_inside(op: Operator, uses: OuterUses) -> AbstractSet[str]:
    """Returns what an operator's sub-blocks use of the block around them, by name."""
    inner = [uses.of_block(index) for index in op.blocks]
    return frozenset().union(*(used.reads | used.writes for used in inner))


def with_names_of_their_own(program: Program, names: Collection[str]) -> Program:
    """Returns a program in which each value that operators write to these names has its own.

    What is written last keeps the name; what was there before has others: `x~1`, `x~2`.

    Args:
        program: any.
        names: temporaries of block 0 that no sub-block uses.
    """
    return _Renaming(program, frozenset(names)).run() if names else program


class _Renaming:
    """Goes through block 0, and gives a name to each value as it is written."""

    def __init__(self, program: Program, several: frozenset[str]) -> None:
        self.program, self.several = program, several
        self.taken = {*program.variables, *program.root.variables}
        self.now: dict[str, str] = {}  # the name of the value that each variable holds
        self.left = dict.fromkeys(several, 0)  # how often it is still written
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
            pairs = tuple((w, _now(self.now, g)) for w, g in op.role_var)
            outputs = op.outputs.renamed(new)
            ops.append(replace(op, inputs=inputs, outputs=outputs, role_var=pairs))
        return self.program.with_block(self.program.root.with_ops(ops, declare=declared))

    def _next(self, name: str) -> str:
        self.left[name] -= 1
        made = unique(name, self.taken) if self.left[name] else name
        self.taken.add(made)
        return made


def _now(names: Mapping[str, str], name: str) -> str:
    return names.get(name, name)

"""Temporaries that are written several times, as several temporaries."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

from jaxfleet.analysis.uses import OuterUses
from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Operator, Program, Variable
from jaxfleet.ir.names import unique


def with_temporaries_written_once(program: Program) -> Program:
    """Returns a program in which no operator of block 0 writes a temporary that another wrote.

    What is written last keeps the name; what was there before has others: `x~1`, `x~2`.

    Raises:
        PassError: a sub-block uses such a temporary, and knows it by one name.
    """
    writes: dict[str, int] = {}
    for op in program.root.ops:
        for name in op.writes:
            if program.lookup(name).kind is Kind.TEMP:
                writes[name] = writes.get(name, 0) + 1
    rest = {name: count for name, count in writes.items() if count > 1}
    return _rewritten(program, rest) if rest else program


def _rewritten(program: Program, rest: dict[str, int]) -> Program:
    uses, several = OuterUses(program), frozenset(rest)
    taken = {*program.variables, *program.root.variables}
    names: dict[str, str] = {}
    ops, declared = list[Operator](), list[Variable]()
    for op in program.root.ops:
        _check_sub_blocks(op, uses, several)
        inputs, new = op.inputs.renamed(names), dict[str, str]()
        for name in [n for n in op.writes if n in several]:
            rest[name] -= 1
            new[name] = unique(name, taken) if rest[name] else name
            taken.add(new[name])
            declared.append(replace(program.lookup(name), name=new[name]))
        names.update(new)
        role_var = tuple((w, _now(names, g)) for w, g in op.role_var)
        ops.append(replace(op, inputs=inputs, outputs=op.outputs.renamed(new), role_var=role_var))
    return program.with_block(program.root.with_ops(ops, declare=declared))


def _now(names: Mapping[str, str], name: str) -> str:
    return names.get(name, name)


def _check_sub_blocks(op: Operator, uses: OuterUses, several: AbstractSet[str]) -> None:
    used = uses.of(op)
    inner = (used.reads - set(op.reads)) | (used.writes - set(op.writes))
    if found := sorted(inner & several):
        raise PassError(f"recompute: '{found[0]}' is written twice, and used in a sub-block", op=op)

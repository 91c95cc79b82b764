"""State that forward overwrites, kept as it was until the step's end."""

from collections.abc import Mapping
from dataclasses import replace

from jaxfleet.analysis.forward_part import forward_places
from jaxfleet.analysis.uses import OuterUses
from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Operands, Operator, Program, Role, Variable
from jaxfleet.ir.names import next_name


def with_state_written_last(program: Program) -> Program:
    """Returns a program whose forward operators leave the state as it is until the end.

    What forward computes again must find there what it found the first time: the running mean of a
    normalization, a key that dropout draws from.

    Raises:
        PassError: a sub-block reads what forward has written anew.
    """
    states = {v.name for v in program.of_kind(Kind.PARAM, Kind.STATE)}
    forward = forward_places(program)
    if not any(states.intersection(program.root.ops[place].writes) for place in forward):
        return program
    uses, names = OuterUses(program), dict[str, str]()
    ops, declared, last = list[Operator](), list[Variable](), list[Operator]()
    for place, op in enumerate(program.root.ops):
        _check_sub_blocks(op, uses, names)
        reads = op.inputs if op.type == "fetch" else op.inputs.renamed(names)
        if place in forward:
            for name in [n for n in op.writes if n in states and n not in names]:
                new = replace(program.variables[name], name=next_name(name), kind=Kind.TEMP)
                names[name] = new.name
                declared.append(new)
        else:
            _check_written_once(op, names)
        ops.append(replace(op, inputs=reads, outputs=op.outputs.renamed(names)))
    last = [_assigned(name, new) for name, new in names.items()]
    at_end = [op for op in ops if op.type == "fetch"]
    others = [op for op in ops if op.type != "fetch"]
    return program.with_block(program.root.with_ops([*others, *last, *at_end], declare=declared))


def _assigned(name: str, new: str) -> Operator:
    return Operator("assign", Operands.of(new), Operands.of(name), role=Role.OPTIMIZE)


def _check_sub_blocks(op: Operator, uses: OuterUses, names: Mapping[str, str]) -> None:
    inner = uses.of(op).reads - set(op.reads)
    if found := sorted(inner & names.keys()):
        what = f"recompute: '{found[0]}' is written by forward, and read in a sub-block after it"
        raise PassError(what, op=op)


def _check_written_once(op: Operator, names: Mapping[str, str]) -> None:
    if found := sorted(names.keys() & set(op.writes)):
        raise PassError(f"recompute: '{found[0]}' is written by forward and after it", op=op)

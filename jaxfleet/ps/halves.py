"""Cuts the program of a trainer that updates: its step, and its exchange with servers."""

from collections.abc import Sequence
from dataclasses import replace

from jaxfleet.ir import Kind, Operator, Program, Role
from jaxfleet.tables.host import LOOKUP, SEND


def step_of(program: Program) -> Program:
    """Returns what runs every step: all that stands before what is of servers."""
    ops, cut = program.root.ops, _cut(program)
    return _only(program, [*ops[:cut], *filter(_is_of_tables, ops[cut:])])


def exchange_of(program: Program) -> Program:
    """Returns what runs every `k_steps`; its params and state are those that it reads or writes."""
    after = program.root.ops[_cut(program) :]
    made = _only(program, [op for op in after if not _is_of_tables(op)])
    return replace(made, name=f"{program.name}.exchange")


def _cut(program: Program) -> int:
    """Returns where the exchange begins; rows of tables are looked up and sent in every step."""
    ops, servers = program.root.ops, {Role.DIST, Role.RPC}
    found = (at for at, o in enumerate(ops) if o.role in servers and not _is_of_tables(o))
    return next(found, len(ops))


def _is_of_tables(op: Operator) -> bool:
    return op.type in {LOOKUP, SEND}


def _only(program: Program, ops: Sequence[Operator]) -> Program:
    inner = {index for op in ops for index in _within(program, op)}
    used = {name for op in ops for name in (*op.reads, *op.writes)}
    blocks = [block if block.index in inner else replace(block, ops=()) for block in program.blocks]
    for index in inner:
        used.update(n for op in program.blocks[index].ops for n in (*op.reads, *op.writes))
    variables = {
        name: variable
        for name, variable in program.variables.items()
        if name in used or variable.kind is Kind.CONST
    }
    root = program.root.with_ops(ops).without_unused()
    blocks[0] = root
    return replace(program, variables=variables, blocks=tuple(blocks))


def _within(program: Program, op: Operator) -> list[int]:
    """Returns the blocks that an operator runs, and those that they run."""
    found = list(op.blocks)
    for index in op.blocks:
        found += [inner for o in program.blocks[index].ops for inner in _within(program, o)]
    return found

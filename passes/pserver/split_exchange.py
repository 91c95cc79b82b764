"""Splits the program of a trainer that updates parameters: its step, and its exchange."""

from collections.abc import Sequence
from dataclasses import replace

from jaxfleet.ir import Kind, Operator, Program, Role

# The look-ups of a step, and the gradients of their rows, as the host runs them.
_TABLE_OPS = frozenset({"distributed_lookup_table", "send_rows"})


def step_program(program: Program) -> Program:
    """Returns the part that runs every step: all operators before the exchange."""
    ops, cut = program.root.ops, _cut(program)
    return _only(program, [*ops[:cut], *filter(_is_of_tables, ops[cut:])])


def exchange_program(program: Program) -> Program:
    """Returns the part that runs every `k_steps`, with the params and state that it uses."""
    after = program.root.ops[_cut(program) :]
    made = _only(program, [op for op in after if not _is_of_tables(op)])
    return replace(made, name=f"{program.name}.exchange")


def _cut(program: Program) -> int:
    """Returns where the exchange begins; table rows are looked up and sent in every step."""
    ops, servers = program.root.ops, {Role.DIST, Role.RPC}
    found = (at for at, o in enumerate(ops) if o.role in servers and not _is_of_tables(o))
    return next(found, len(ops))


def _is_of_tables(op: Operator) -> bool:
    return op.type in _TABLE_OPS


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
    found = list(op.blocks)
    for index in op.blocks:
        found += [inner for o in program.blocks[index].ops for inner in _within(program, o)]
    return found

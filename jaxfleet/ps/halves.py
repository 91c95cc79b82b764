"""Cuts the program of a trainer that updates: its step, and its exchange with servers."""

from collections.abc import Sequence
from dataclasses import replace

from jaxfleet.ir import Kind, Operator, Program, Role


def step_of(program: Program) -> Program:
    """Returns what runs every step: all that stands before what is of servers."""
    return _only(program, program.root.ops[: _cut(program)])


def exchange_of(program: Program) -> Program:
    """Returns what runs every `k_steps`; its params and state are those that it reads or writes."""
    made = _only(program, program.root.ops[_cut(program) :])
    return replace(made, name=f"{program.name}.exchange")


def _cut(program: Program) -> int:
    ops = program.root.ops
    return next((at for at, op in enumerate(ops) if op.role in {Role.DIST, Role.RPC}), len(ops))


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

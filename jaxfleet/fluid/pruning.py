"""Programs cut down to what is needed: by targets, or to what a model that is used needs."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jaxfleet.analysis.memory.reused import held_by
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.copying import copied, drop_unused
from jaxfleet.fluid.dtypes import VarType
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.to_ir import ir_program
from jaxfleet.fluid.variable import Variable
from jaxfleet.ir.names import INSTEAD_OF

if TYPE_CHECKING:
    from jaxfleet.fluid.block import Block
    from jaxfleet.fluid.program import Program


def pruned(program: "Program", feeded: Sequence[str], targets: Sequence[object]) -> "Program":
    """Returns a copy with only the operators that targets need.

    What updates a parameter or other state in optimize is only kept where it is a target itself:
    it is not what made the value that another operator reads.

    Args:
        program: it.
        feeded: names of variables that are fed: what makes them is not needed.
        targets: variables, their names, or operators.

    Raises:
        ValueError: one of them is something else, nothing makes it, or it was overwritten.
    """
    for name in feeded:
        if not isinstance(name, str):
            what = f"a program is pruned by names of what is fed, not by a {type(name).__name__}"
            raise mistake(what, "give the variables' names")
    named = [_name_of(x) for x in targets if not isinstance(x, Operator)]
    lie = [*lying_in(program, named), *(x for x in targets if isinstance(x, Operator))]
    kept = _needed(program.global_block(), frozenset(feeded), lie)
    made = copied(program)
    root = made.global_block()
    root.ops = [op for at, op in enumerate(root.ops) if at in kept]
    _empty_unreached(made)
    used = {name for op in root.ops for name in (*_reads(op), *op.output_arg_names)}
    drop_unused(root, used.union(named))
    return made


def lying_in(program: "Program", names: Sequence[str]) -> tuple[str, ...]:
    """Returns the variables in which values lie when a program ends.

    Raises:
        FeedError: `memory_optimize` gave the memory of one to another.
    """
    if any(INSTEAD_OF in op.attrs for op in program.global_block().ops):
        return held_by(ir_program(program), names)
    return tuple(names)


def as_inference(program: "Program", *, prune_read_op: bool) -> "Program":
    """Tells the operators of a program that they are tested; returns it.

    Args:
        program: it; changed.
        prune_read_op: take out a reader at the beginning, so that data is fed.
    """
    root = program.global_block()
    if prune_read_op:
        program._readers = []
        reads = next((at for at, op in enumerate(root.ops) if op.type == "read"), -1)
        root.ops = root.ops[reads + 1 :]
        for name in [v.name for v in root.vars.values() if v.type == VarType.READER]:
            root._remove_var(name)
    for block in program.blocks:
        for op in block.ops:
            if op.has_attr("is_test"):
                op._set_attr("is_test", True)
    program.version += 1
    return program


def _needed(root: "Block", feeded: frozenset[str], targets: Sequence[object]) -> set[int]:
    """Returns the places of the operators that are kept."""
    asked = {id(x) for x in targets if isinstance(x, Operator)}
    needed = {_name_of(x) for x in targets if not isinstance(x, Operator)} - feeded
    _check_made(root, needed, targets)
    kept = set()
    for at in range(len(root.ops) - 1, -1, -1):
        op = root.ops[at]
        makes = not needed.isdisjoint(op.output_arg_names) and not _updates_state(op)
        if makes or id(op) in asked:
            kept.add(at)
            needed.update(name for name in _reads(op) if name not in feeded)
    return kept


def _name_of(target: object) -> str:
    if isinstance(target, Variable):
        return target.name
    if isinstance(target, str):
        return target
    what = f"a program is pruned to Variables and Operators, not to a {type(target).__name__}"
    raise mistake(what)


def _check_made(root: "Block", names: Iterable[str], targets: Sequence[object]) -> None:
    there = {name for op in root.ops if not _updates_state(op) for name in op.output_arg_names}
    there.update(v.name for v in root.vars.values() if v.persistable)  # the scope has them
    for name in sorted(set(names) - there):
        what = f"no operator makes '{name}', and a program is to be pruned to what makes it"
        raise mistake(what, "name a variable of this program, or an operator")
    for op in targets:
        if isinstance(op, Operator) and not any(op is x for x in root.ops):
            raise mistake(f"operator '{op.type}' is not in block 0 of the program to be pruned")


def _updates_state(op: Operator) -> bool:
    """Tells whether an operator of optimize writes what outlives the run."""
    if not op._is_optimize_op():
        return False
    written = (op.block._find_var_recursive(name) for name in op.output_arg_names)
    return any(v is not None and v.persistable for v in written)


def _reads(op: Operator) -> list[str]:
    """Returns what an operator reads, its sub-blocks included."""
    found = op.input_arg_names
    for inner in op._inner_blocks():
        outer = (name for x in inner.ops for name in _reads(x) if name not in inner.vars)
        found.extend(outer)
    return found


def _empty_unreached(program: "Program") -> None:
    """Empties the blocks that no operator runs any more; their numbers stay."""
    reached, waiting = {0}, [program.global_block()]
    while waiting:
        for inner in (block for op in waiting.pop().ops for block in op._inner_blocks()):
            if inner.idx not in reached:
                reached.add(inner.idx)
                waiting.append(inner)
    for block in program.blocks:
        if block.idx not in reached:
            block.ops, block.vars = [], {}

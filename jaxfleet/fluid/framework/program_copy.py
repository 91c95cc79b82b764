"""Copies of programs: whole, without backward, or pruned to their targets."""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxfleet.analysis.memory.final_variables import final_variables
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.operator import ROLE, Operator, OpRole
from jaxfleet.fluid.framework.to_ir import ir_program
from jaxfleet.fluid.framework.types import VarType
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.ir.naming import INSTEAD_OF

if TYPE_CHECKING:
    from jaxfleet.fluid.framework.block import Block
    from jaxfleet.fluid.framework.program import Program

_NOT_FOR_TEST = OpRole.BACKWARD | OpRole.OPTIMIZE


def copy_program(program: "Program") -> "Program":
    """Returns a deep copy: blocks, variables, parameters, operators with their source lines."""
    made = copy.copy(program)
    for name, value in vars(program).items():
        if isinstance(value, list | dict):
            setattr(made, name, value.copy())
    made.blocks = [block._copied(made) for block in program.blocks]
    inner = {id(old): new for old, new in zip(program.blocks, made.blocks, strict=True)}
    for block in made.blocks:
        for parameter in block.all_parameters():
            rates = parameter.optimize_attr.items()
            parameter.optimize_attr = {k: _own(block, value) for k, value in rates}
        for op in block.ops:
            for name, value in op.attrs.items():
                if id(value) in inner:
                    op.attrs[name] = inner[id(value)]
                elif isinstance(value, list) and value and id(value[0]) in inner:
                    op.attrs[name] = [inner[id(block)] for block in value]
    return made


def _own(block: "Block", value: Any) -> Any:
    """Replaces a variable of another program by the block's variable of the same name."""
    return block.vars.get(value.name, value) if isinstance(value, Variable) else value


def without_backward(program: "Program") -> "Program":
    """Removes gradients, updates and the variables that only they used; returns the program."""
    for block in program.blocks:
        block.ops = [op for op in block.ops if not op.attrs[ROLE] & _NOT_FOR_TEST]
    used = {
        name
        for block in program.blocks
        for op in block.ops
        for name in (*op.input_arg_names, *op.output_arg_names)
    }
    for block in program.blocks:
        kept = {v.name for v in block.vars.values() if v.persistable or v.is_data}
        drop_unused(block, used | kept)
    program.version += 1
    return program


def drop_unused(block: "Block", used: Collection[str]) -> None:
    """Removes unused variables from a block."""
    block.vars = {name: v for name, v in block.vars.items() if name in used}


def copy_parameter_info(source: "Program", target: "Program") -> None:
    """Turns variables into parameters where the source has parameters of the same names."""
    for known in source.all_parameters():
        block = target.block(known.block.idx)
        variable = block.vars.get(known.name)
        if variable is None:
            continue  # it was pruned
        made = known._copied(block)
        made.sizes, made.dtype, made.type = variable.sizes, variable.dtype, variable.type
        block.vars[known.name] = made
    target.version += 1


def copy_data_info(source: "Program", target: "Program", blocks: Mapping[int, int]) -> None:
    """Turns variables into data where the source has data of the same names.

    `blocks` maps blocks of the target to those of the source, where the numbers differ.
    """
    for block in target.blocks:
        outer = source.block(blocks.get(block.idx, block.idx))
        for name, variable in block.vars.items():
            known = outer.vars.get(name)
            if known is not None and known.is_data:
                variable.is_data, variable.need_check_feed = True, known.need_check_feed
    target.version += 1


def prune_to(program: "Program", feeded: Sequence[str], targets: Sequence[object]) -> "Program":
    """Returns a copy with only the operators that targets (variables, names, operators) need.

    An optimize operator that updates a parameter or other state is kept only if it is itself a
    target: the value that another operator reads does not come from it. Producers of `feeded`
    variables are not needed. Raises ValueError if a target is of another kind, is not produced, or
    was overwritten.
    """
    for name in feeded:
        if not isinstance(name, str):
            what = f"a program is pruned by names of what is fed, not by a {type(name).__name__}"
            raise mistake(what, "give the variables' names")
    named = [_name_of(x) for x in targets if not isinstance(x, Operator)]
    lie = [*holders_of(program, named), *(x for x in targets if isinstance(x, Operator))]
    kept = _needed(program.global_block(), frozenset(feeded), lie)
    made = copy_program(program)
    root = made.global_block()
    root.ops = [op for at, op in enumerate(root.ops) if at in kept]
    _empty_unreached(made)
    used = {name for op in root.ops for name in (*_reads(op), *op.output_arg_names)}
    drop_unused(root, used.union(named))
    return made


def holders_of(program: "Program", names: Sequence[str]) -> tuple[str, ...]:
    """Returns the variables that hold the given values when a program ends.

    FeedError if `memory_optimize` reused the memory of one for another.
    """
    if any(INSTEAD_OF in op.attrs for op in program.global_block().ops):
        return final_variables(ir_program(program), names)
    return tuple(names)


def mark_inference(program: "Program", *, prune_read_op: bool) -> "Program":
    """Sets `is_test` on the operators of a program, and optionally removes a leading reader."""
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
    """Returns the positions of the operators to keep."""
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
    """Whether an optimize operator writes a variable that outlives the run."""
    if not op._is_optimize_op():
        return False
    written = (op.block._find_var_recursive(name) for name in op.output_arg_names)
    return any(v is not None and v.persistable for v in written)


def _reads(op: Operator) -> list[str]:
    """Returns the inputs of an operator, including those of its sub-blocks."""
    found = op.input_arg_names
    for inner in op._inner_blocks():
        outer = (name for x in inner.ops for name in _reads(x) if name not in inner.vars)
        found.extend(outer)
    return found


def _empty_unreached(program: "Program") -> None:
    """Empties the blocks that no operator runs any more, keeping block numbers."""
    reached, waiting = {0}, [program.global_block()]
    while waiting:
        for inner in (block for op in waiting.pop().ops for block in op._inner_blocks()):
            if inner.idx not in reached:
                reached.add(inner.idx)
                waiting.append(inner)
    for block in program.blocks:
        if block.idx not in reached:
            block.ops, block.vars = [], {}

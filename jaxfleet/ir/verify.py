"""The verifier: one readable rule a line, run between passes.

The structural rules are here. Rules that need to know what an operator means (shapes,
replication) live in `jaxfleet.analysis` and are handed in.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from jaxfleet.errors import VerifyError
from jaxfleet.ir.program import Block, Operator, Program
from jaxfleet.ir.types import Kind

Finding: TypeAlias = tuple[str, Operator | None]  # what is wrong, and the operator it is about
Rule: TypeAlias = Callable[[Program], Iterator[Finding]]


def verify(program: Program, *, more_rules: Iterable[Rule] = ()) -> None:
    """Checks a program against the structural rules, then against further rules.

    Raises:
        VerifyError: the first rule that is broken, with the operator.
    """
    for rule in (*STRUCTURAL_RULES, *more_rules):
        for what, op in rule(program):
            raise VerifyError(f"program '{program.name}': {what}", op=op)


def blocks_are_numbered_by_place(program: Program) -> Iterator[Finding]:
    """A block's index is its place, and its parent comes before it."""
    for place, block in enumerate(program.blocks):
        if block.index != place:
            yield f"block {block.index} stands at place {place}", None
        if (block.parent != -1) if place == 0 else not 0 <= block.parent < place:
            yield f"block {place} has parent {block.parent}", None


def names_match_their_keys(program: Program) -> Iterator[Finding]:
    """A variable is kept under its own name."""
    for scope in (program.variables, *(block.variables for block in program.blocks)):
        for name, variable in scope.items():
            if name != variable.name:
                yield f"variable '{variable.name}' is kept under '{name}'", None


def constants_have_values(program: Program) -> Iterator[Finding]:
    """A const has a value, and nothing else has one."""
    for scope in (program.variables, *(block.variables for block in program.blocks)):
        for variable in scope.values():
            if (variable.kind is Kind.CONST) != (variable.constant is not None):
                yield f"{variable.kind.value} '{variable.name}' has the wrong value field", None


def operands_are_declared(program: Program) -> Iterator[Finding]:
    """Every variable that an operator names can be seen from its block."""
    for block in program.blocks:
        seen = _visible(program, block)
        for op in block.ops:
            for name in (*op.reads, *op.writes):
                if name not in seen:
                    yield f"'{name}' is not declared in block {block.index}", op
        for name in (*block.args, *block.results):
            if isinstance(name, str) and name not in seen:
                yield f"'{name}', of block {block.index}'s heading, is not declared", None


def outputs_are_variables(program: Program) -> Iterator[Finding]:
    """An operator writes variables, not literals, and none of them twice."""
    for block in program.blocks:
        for op in block.ops:
            if len(set(op.writes)) != len(op.outputs):
                yield "an output is written twice or is a literal", op


def temporaries_are_written_before_read(program: Program) -> Iterator[Finding]:
    """In the root and in function blocks, a temporary is written before it is read."""
    for block in program.blocks:
        if block.index and not block.args:
            continue
        written = set(block.args)
        for op in block.ops:
            for name in op.reads:
                own = block.variables.get(name)
                if own is not None and own.kind is Kind.TEMP and name not in written:
                    yield f"'{name}' is read before anything writes it", op
            written.update(op.writes)
            for index in op.blocks:
                if index < len(program.blocks):
                    written.update(name for o in program.blocks[index].ops for name in o.writes)


def data_and_constants_are_not_written(program: Program) -> Iterator[Finding]:
    """No operator writes a const; the root writes no data that it did not receive."""
    for block in program.blocks:
        for op in block.ops:
            for name in op.writes:
                found = program.variables.get(name)
                if found is not None and name not in block.variables and found.kind is Kind.CONST:
                    yield f"const '{name}' is written", op


def sub_blocks_exist(program: Program) -> Iterator[Finding]:
    """A block reference names a block other than the root, and a child of where it is used."""
    for block in program.blocks:
        for op in block.ops:
            for index in op.blocks:
                if not 0 < index < len(program.blocks):
                    yield f"^{index} names no block", op
                elif index == block.index:
                    yield f"^{index} is the block it is in", op


def role_vars_are_pairs_of_names(program: Program) -> Iterator[Finding]:
    """The parameter of a (parameter, gradient) pair is declared."""
    for block in program.blocks:
        seen = _visible(program, block)
        for op in block.ops:
            for param, _ in op.role_var:
                if param not in seen:
                    yield f"'{param}', which the operator is for, is not declared", op


STRUCTURAL_RULES: tuple[Rule, ...] = (
    blocks_are_numbered_by_place,
    names_match_their_keys,
    constants_have_values,
    sub_blocks_exist,
    operands_are_declared,
    outputs_are_variables,
    temporaries_are_written_before_read,
    data_and_constants_are_not_written,
    role_vars_are_pairs_of_names,
)


def _visible(program: Program, block: Block) -> set[str]:
    seen: set[str] = set()
    for scope in program.scopes(block):
        seen.update(scope)
    return seen

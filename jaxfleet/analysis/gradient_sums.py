"""Reductions over devices that complete gradients.

A reduction with `role_var` is marked as one. A reduction whose gradient is processed further before
a wrapped optimizer reads it (a transformation chained in front, a user's pass) has no mark. It is
found by data flow: its value goes from the backward pass to the new value of a parameter, or of a
state that accumulates gradients, past no other reduction. A statistic of the batch that the
backward pass sums is summed again on its way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from jaxfleet.analysis.flow import Flow, FlowValue
from jaxfleet.ir import Kind, Operator, Program, Role, Variable

_REDUCTIONS = ("c_allreduce", "c_reducescatter")


@dataclass(frozen=True)
class Reduction:
    """An operator that sums over devices."""

    op: Operator
    role: Role  # its own, or that of the operator whose sub-block contains it
    # its operands; only the marked gradients if it has a mark, for a metric may be summed along
    # with them
    summed: tuple[Variable, ...]
    of_gradients: bool  # whether it completes gradients


def reductions(program: Program, *, unmarked: bool = True) -> list[Reduction]:
    """Returns all reductions over devices of a program.

    With `unmarked` also those without `role_var` may complete gradients; pass False where devices
    average parameters, which reach updates too.
    """
    roles = _roles_of_blocks(program)
    found = list(_reductions(program))
    if unmarked and any(not op.role_var for _, op in found):
        trained = _to_updates(program, roles)
    else:
        trained = set[FlowValue]()
    return [
        Reduction(op, _role(op, roles[at.block]), _summed(program, at, op),
                  bool(op.role_var) or at in trained)
        for at, op in found
    ]  # fmt: skip


def trains(program: Program) -> bool:
    """Whether a program updates parameters from a backward pass."""
    if any(op.role_var for block in program.blocks for op in block.ops):
        return True
    flow = Flow.of(program)
    updated = _updated(program, flow, Kind.PARAM)
    return not updated.isdisjoint(_backward(program, flow, _roles_of_blocks(program)))


def with_roles(program: Program) -> Iterator[tuple[Operator, Role]]:
    """Yields all operators, those of a sub-block with the role of the operator that runs it."""
    roles = _roles_of_blocks(program)
    for block in program.blocks:
        yield from ((op, _role(op, roles[block.index])) for op in block.ops)


def _reductions(program: Program) -> Iterator[tuple[FlowValue, Operator]]:
    for block in program.blocks:
        for place, op in enumerate(block.ops):
            if op.type.startswith(_REDUCTIONS):
                yield FlowValue(block.index, place, 0), op


def _to_updates(program: Program, roles: list[Role | None]) -> set[FlowValue]:
    """Returns the first outputs of reductions without `role_var` that complete gradients."""
    flow = Flow.of(program)
    found = {at for at, op in _reductions(program) if not op.role_var}
    stops = {at[:2] for at, _ in _reductions(program)}
    new = _updated(program, flow, Kind.PARAM, Kind.STATE)
    near = new | flow.reaching(new, lambda value: value[:2] not in stops)
    backward = _backward(program, flow, roles)
    return {at for at in found & near & backward if _is_like_a_gradient(program, at, roles)}


def _updated(program: Program, flow: Flow, *kinds: Kind) -> set[FlowValue]:
    """Returns the new values of the variables that carry over to the next step."""
    names = {variable.name for kind in kinds for variable in program.of_kind(kind)}
    return {value for name, value in flow.final.items() if name in names}


def _backward(program: Program, flow: Flow, roles: list[Role | None]) -> set[FlowValue]:
    """Returns the values of the backward pass and those computed from them."""
    start = {
        FlowValue(block.index, place, output)
        for block in program.blocks
        for place, op in enumerate(block.ops)
        if _role(op, roles[block.index]) is Role.BACKWARD
        for output in range(len(op.writes))
    }
    return start | flow.reached(start, lambda _: True)


def _is_like_a_gradient(program: Program, at: FlowValue, roles: list[Role | None]) -> bool:
    """Whether a reduction has the size of some parameter; a norm in an update is a scalar."""
    op = program.blocks[at.block].ops[at.place]
    shapes = {variable.shape for variable in program.of_kind(Kind.PARAM)}
    if _role(op, roles[at.block]) is not Role.BACKWARD:
        return all(variable.shape in shapes for variable in _summed(program, at, op))
    sizes = {_elements(shape) for shape in shapes}
    return all(_elements(variable.shape) in sizes for variable in _summed(program, at, op))


def _elements(shape: tuple[object, ...]) -> int | None:
    known = [size for size in shape if isinstance(size, int)]
    return prod(known) if len(known) == len(shape) else None


def _summed(program: Program, at: FlowValue, op: Operator) -> tuple[Variable, ...]:
    names = [grad for _, grad in op.role_var] or op.reads
    return tuple(program.lookup(name, program.blocks[at.block]) for name in names)


def _roles_of_blocks(program: Program) -> list[Role | None]:
    """Returns, for each block, the role of the outermost operator that contains it."""
    roles: list[Role | None] = [None] * len(program.blocks)
    for block in program.blocks:  # sub-blocks come after the block that uses them
        for op in block.ops:
            for index in op.blocks:
                roles[index] = _role(op, roles[block.index])
    return roles


def _role(op: Operator, outer: Role | None) -> Role:
    """Returns an operator's role; capture marks operators of sub-blocks as forward only."""
    return outer if outer is not None and op.role.is_forward else op.role

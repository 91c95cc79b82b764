"""Which operators of a training step are its forward part, whatever stands behind it."""

from collections.abc import Set as AbstractSet

from jaxfleet.analysis.uses import OuterUses
from jaxfleet.ir import Program, Role

_BACKWARD = frozenset({Role.BACKWARD, Role.BACKWARD_LOSS, Role.OPTIMIZE, Role.OPTIMIZE_LR_SCHED})
_EXCHANGE = frozenset({Role.RPC, Role.DIST})


def forward_places(program: Program) -> AbstractSet[int]:
    """Returns the places of forward operators, and of what they need, schedules included.

    An operator that is called forward and reads what backward or the optimizer made is none: a
    metric of gradients, or of new parameters, comes when those are there.

    Args:
        program: a training step with roles.
    """
    uses = OuterUses(program)
    late, ops = _late(program, uses), program.root.ops
    found, needed = set[int](), set[str]()
    for place in sorted(set(range(len(ops))) - late, reverse=True):
        op, used = ops[place], uses.of(ops[place])
        if (op.role.is_forward and op.type != "fetch") or not needed.isdisjoint(used.writes):
            found.add(place)
            needed -= set(op.writes)
            needed |= used.reads
    return found


def _late(program: Program, uses: OuterUses) -> AbstractSet[int]:
    """Returns the places of what runs behind forward: it makes gradients, or waits for some."""
    found, made = set[int](), set[str]()
    for place, op in enumerate(program.root.ops):
        used = uses.of(op)
        waits = op.role in _BACKWARD or (op.role in _EXCHANGE and bool(found))
        if waits or not made.isdisjoint(used.reads):
            found.add(place)
            made |= used.writes
        else:
            made -= set(op.writes)
    return found

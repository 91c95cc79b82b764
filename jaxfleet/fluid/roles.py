"""The roles of operators, with fluid's numbers."""

from collections.abc import Mapping

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Role


class OpRole:
    """What part of a training step an operator belongs to, as fluid counts it."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZE = 2
    RPC = 4
    DIST = 8
    LR_SCHED = 16
    LOSS = 256
    NOT_SPECIFIED = 4096


_ROLES: Mapping[int, Role] = {
    OpRole.FORWARD: Role.FORWARD,
    OpRole.FORWARD | OpRole.LOSS: Role.FORWARD_LOSS,
    OpRole.BACKWARD: Role.BACKWARD,
    OpRole.BACKWARD | OpRole.LOSS: Role.BACKWARD_LOSS,
    OpRole.OPTIMIZE: Role.OPTIMIZE,
    OpRole.OPTIMIZE | OpRole.LR_SCHED: Role.OPTIMIZE_LR_SCHED,
    OpRole.LR_SCHED: Role.LR_SCHED,
    OpRole.RPC: Role.RPC,
    OpRole.DIST: Role.DIST,
    OpRole.NOT_SPECIFIED: Role.FORWARD,
}


def ir_role(number: int) -> Role:
    """Returns the IR's role of one of fluid's numbers.

    Raises:
        ProgramError: fluid has no such combination.
    """
    if number not in _ROLES:
        known = ", ".join(map(str, sorted(_ROLES)))
        raise ProgramError(f"{number} is no role of an operator", hint=f"roles are {known}")
    return _ROLES[number]


def number_of(role: Role) -> int:
    """Returns fluid's number of one of the IR's roles."""
    return next(number for number, known in _ROLES.items() if known is role)

"""Finds the sums over the batch that are statistics of it, as BatchNorm keeps.

They are what the state that no optimizer touches is updated from in the forward part, and, in the
backward part, the sums of the same modules (by jax's name stack) that are no gradient.
"""

from collections.abc import Callable

from jaxfleet.analysis.labels import Plan
from jaxfleet.ir import Kind, Operator, Program, Role


def batch_statistics(program: Program, plan: Plan) -> Callable[[Operator], bool]:
    """Returns a test for the operators whose sums over the batch may stay a device's own.

    Args:
        program: a one-device program.
        plan: its labels with statistics over the whole batch.
    """
    ops = program.root.ops
    feeds = _feeds_statistics(program)
    scopes = {
        ops[place].source.scope
        for index, place, how in plan.completions()
        if index == 0 and how == "sum" and feeds.intersection(ops[place].writes)
    }

    def is_statistic(op: Operator) -> bool:
        if op.role is Role.FORWARD:
            return bool(feeds.intersection(op.writes)) and op.source.scope in scopes
        return op.role is Role.BACKWARD and not op.role_var and op.source.scope in scopes

    return is_statistic


def _feeds_statistics(program: Program) -> set[str]:
    """Returns what the forward updates of state depend on."""
    stats = {variable.name for variable in program.of_kind(Kind.STATE)}
    needed: set[str] = set()
    for op in reversed(program.root.ops):
        if op.role is Role.FORWARD and (stats | needed).intersection(op.writes):
            needed.update(op.reads)
            needed.update(op.writes)
    return needed

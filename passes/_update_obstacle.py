"""Says why servers cannot make a step's update, if they cannot."""

from jaxfleet.analysis.groups import OptimizeGroups, Reason, optimize_groups
from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Operator, Program, Variable
from jaxfleet.passes._bodies import Bodies
from jaxfleet.passes._effects import Effects
from jaxfleet.passes._work import Work


def update_obstacle(program: Program) -> Reason | None:
    """Returns why servers cannot make a step's update, or None where they can.

    Args:
        program: a captured step, divided among trainers or not.
    """
    groups = optimize_groups(program)
    if (op := of_the_batch(groups)) is not None:
        return Reason("the optimizer computes with the batch", op)
    try:
        Work(Bodies(groups))
    except PassError as error:
        return Reason(error.what, error.op if isinstance(error.op, Operator) else None)
    return None


def of_the_batch(groups: OptimizeGroups) -> Operator | None:
    """Returns the first operator of the update that needs rows of the batch, or sums over them."""
    effects, program = Effects(), groups.program
    places = {*groups.lr_ops, *groups.crossing_ops, *(at for g in groups.groups for at in g.ops)}
    for place in sorted(places):
        op = program.root.ops[place]
        used = [program.lookup(name) for name in (*op.reads, *op.writes)]
        if effects.is_collective(op) or any(map(_has_rows, used)):
            return op
    return None


def _has_rows(variable: Variable) -> bool:
    is_fed = variable.kind is Kind.DATA and bool(variable.shape)
    return is_fed or not all(isinstance(size, int) for size in variable.shape)

"""Refuses what needs all trainers, or a server's answer within a step, where nobody waits."""

from jaxfleet.analysis.groups import OptimizeGroups
from jaxfleet.analysis.groups.section import gradients_of
from jaxfleet.errors import PassError
from jaxfleet.passes._bodies import Bodies
from jaxfleet.passes._update_obstacle import of_the_batch
from jaxfleet.passes._work import Work

_WAY_OUT = (
    "communication='geo' and 'fl' leave the optimizer on trainers and can do this; so can 'sync'"
)


def refuse_whole_updates(groups: OptimizeGroups) -> None:
    """Refuses a step whose update is no work for servers: of the batch, or inside a loop.

    Raises:
        PassError: it names the operator.
    """
    if (op := of_the_batch(groups)) is not None:
        raise PassError("the optimizer computes with the batch", op=op, hint=_WAY_OUT)
    for group in groups.groups:
        if not group.gradients:
            ops = [groups.program.root.ops[place] for place in group.ops[:1]]
            what = f"the update of '{group.name}' runs inside a loop or a branch"
            raise PassError(what, op=ops[0] if ops else None, hint=_WAY_OUT)


def refuse_waits(bodies: Bodies, work: Work) -> None:
    """Refuses a step whose trainers and servers would have to wait for each other within it.

    Raises:
        PassError: it names the operator.
    """
    ops = bodies.groups.program.root.ops
    if bodies.combine is not None:
        place = bodies.groups.crossing_ops[0]
        what = f"the optimizer brings parameters together ('{ops[place].writes[0]}')"
        what = f"{what}, and servers that do not wait for all trainers cannot"
        hint = f"clip gradients before jf.distributed_optimizer's update; {_WAY_OUT}"
        raise PassError(what, op=ops[place], hint=hint)
    if work.state:
        what = f"trainers read '{min(work.state)}', which servers update with the parameters"
        op = next(op for op in ops if min(work.state) in op.reads)
        raise PassError(what, op=op, hint=_WAY_OUT)
    sent = {name for group in bodies.groups.groups for name in group.gradients}
    for gradient, param in gradients_of(bodies.groups.program).items():
        if gradient not in sent:
            what = f"'{param}' is updated more than once in a step, and servers make one update"
            raise PassError(what, op=next(op for op in ops if gradient in op.writes), hint=_WAY_OUT)
    for place, names in sorted(work.needs.items()):
        what = f"trainers read '{min(names)}', which servers make in the same step"
        raise PassError(what, op=ops[place], hint=_WAY_OUT)

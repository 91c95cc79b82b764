"""Rules for branches and recomputation: the sub-block is planned with what goes in."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from jaxfleet.analysis.labels import loops
from jaxfleet.analysis.labels.label import REPLICATED, Label, agreed, settle, sharded
from jaxfleet.analysis.labels.placing import Placing, View, along, gathered
from jaxfleet.analysis.labels.plan import BlockPlan
from jaxfleet.analysis.labels.planner import Planner, block_at, blocks_of

Rule: TypeAlias = Callable[[Planner, View], Placing]


def place(planner: Planner, view: View) -> Placing:
    """Returns how an operator with sub-blocks runs on the devices."""
    return _RULES.get(view.op.type, _alone)(planner, view)


def _remat(planner: Planner, view: View) -> Placing:
    plan = planner.enter(block_at(planner, view, "body"), view.labels)
    return along(view, plan.args, *plan.results)


def _cond(planner: Planner, view: View) -> Placing:
    """Takes what any branch needs complete complete into all of them.

    A sum that one branch makes is completed there, if it must be complete afterwards and another
    branch hands on a value that is complete: taking that branch then costs no all-reduce.
    """
    blocks, args = blocks_of(planner, view), list(view.labels[1:])
    while True:
        plans = [planner.enter(block, args) for block in blocks]
        settled = [
            settle(label)
            if label.is_sum and any(planner.is_completed_arg(block, place) for block in blocks)
            else label
            for place, label in enumerate(args)
        ]
        if settled == args:
            break
        args = settled
    results = [_joined(view, plans, place) for place in range(len(view.out_shapes))]
    for block in blocks:
        planner.enter(block, args, results)
    return along(view, (REPLICATED, *args), *results)


def _joined(view: View, plans: Sequence[BlockPlan], place: int) -> Label:
    """Returns how a result lies, whichever branch made it."""
    label = agreed(plan.found[place] for plan in plans)
    is_there = any(plan.found[place] == REPLICATED and place not in plan.zeros for plan in plans)
    return settle(label) if label.is_sum and is_there and place in view.needed else label


def _reduce(planner: Planner, view: View) -> Placing:
    """Keeps rows where other axes than the cut one are reduced."""
    planner.run_alone(block_at(planner, view, "body"))
    axes, half = view.ints("dimensions"), len(view.labels) // 2
    cut = {label.axis for label in view.labels if label.is_sharded}
    if len(cut) != 1 or not cut.isdisjoint(axes):
        return gathered(view, "the reduction is over rows of the batch")
    (axis,) = cut
    inputs = [*[sharded(axis)] * half, *(settle(label) for label in view.labels[half:])]
    return along(view, inputs, *[sharded(axis - sum(place < axis for place in axes))] * half)


def _alone(planner: Planner, view: View) -> Placing:
    for block in blocks_of(planner, view):
        planner.run_alone(block)
    return gathered(view, f"no rule keeps the rows of {view.op.type} apart")


_RULES: Mapping[str, Rule] = {
    "jax.remat2": _remat,
    "jax.cond": _cond,
    "jax.reduce": _reduce,
    "jax.scan": loops.scan,
    "jax.while": loops.while_loop,
}

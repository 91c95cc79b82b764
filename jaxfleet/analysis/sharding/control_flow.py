"""Sharding rules for loops, branches and recomputation, which propagate into their sub-blocks.

A carried value has the same sharding at the start and the end of an iteration, found by propagating
through the body up to a fixed point. If each iteration only adds to the carried values, each device
accumulates over its own iterations, and these sums are summed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from jaxfleet.analysis.sharding.plan import (
    BlockPlan,
    OperatorSharding,
    OperatorView,
    PropagationContext,
    along,
    block_at,
    blocks_of,
    gathered,
)
from jaxfleet.analysis.sharding.spec import (
    REPLICATED,
    SUM,
    Sharding,
    common_sharding,
    completed,
    sharded,
)
from jaxfleet.ir import Block, Operand

_ADDING = {"jax.add": (0, 1), "jax.add_any": (0, 1), "jax.sub": (0,)}


def accumulators(body: Block, first: int, last: int) -> frozenset[int] | None:
    """Returns which carried values are accumulators, or None if another one changes.

    The carried values are the arguments `first` to `last - 1` of a scan's body. A value that every
    iteration passes on unchanged is not an accumulator, and is allowed.
    """
    readers = _readers(body)
    adding: set[int] = set()
    for place, name in enumerate(body.args[first:last]):
        if body.results[place] == name:
            continue
        if not _is_added_to(name, place, body, readers):
            return None
        adding.add(place)
    return frozenset(adding)


def _is_added_to(name: str, place: int, body: Block, readers: Mapping[Operand, list[int]]) -> bool:
    """Whether a value reaches a result through additions alone, and nothing else."""
    while True:
        found = readers.get(name, [])
        if len(found) != 1:
            return False
        if found[0] < 0:
            return found[0] == -1 - place
        op = body.ops[found[0]]
        if op.type == "jax.convert_element_type":  # made by jax for a Python number
            if body.variables[name].type != body.variables[op.writes[0]].type:
                return False
        elif op.inputs.index(name) not in _ADDING.get(op.type, ()):
            return False
        (name,) = op.writes


def _readers(body: Block) -> dict[Operand, list[int]]:
    """Returns the readers of each value: the places of operators, and -1 - n for the result n."""
    readers: dict[Operand, list[int]] = {}
    for number, op in enumerate(body.ops):
        for operand in op.inputs:
            readers.setdefault(operand, []).append(number)
    for place, operand in enumerate(body.results):
        readers.setdefault(operand, []).append(-1 - place)
    return readers


def scan(planner: PropagationContext, view: OperatorView) -> OperatorSharding:
    """Scans over whole values with rows and summands carried, or over each device's own rows."""
    body = block_at(planner, view, "body")
    first, last = view.number("num_consts"), view.number("num_consts") + view.number("num_carry")
    if sharded(0) in view.labels[last:]:
        return _over_rows(planner, view, first, last)
    consts, xs = view.labels[:first], [_moved(label, -1) for label in view.labels[last:]]

    def turn(carry: Sequence[Sharding]) -> Sequence[Sharding]:
        return planner.enter(body, [*consts, *carry, *xs]).results[: last - first]

    def is_needed(place: int) -> bool:
        return planner.is_completed_arg(body, first + place)

    carry = _standing(view.labels[first:last], turn, is_needed)
    plan = planner.enter(body, [*consts, *carry, *xs])
    stacks = plan.found[last - first :]
    plan = planner.enter(body, plan.args, [*carry, *stacks])
    inputs = [*plan.args[:last], *(_moved(label, 1) for label in plan.args[last:])]
    return along(view, inputs, *carry, *(_moved(label, 1) for label in stacks))


def while_loop(planner: PropagationContext, view: OperatorView) -> OperatorSharding:
    """Carries rows and summands; all devices agree on when to stop."""
    cond, body = block_at(planner, view, "cond"), block_at(planner, view, "body")
    first, last = view.number("cond_nconsts"), view.number("body_nconsts")
    last += first
    tested, used = view.labels[:first], view.labels[first:last]

    def turn(carry: Sequence[Sharding]) -> Sequence[Sharding]:
        planner.enter(cond, [*tested, *carry], [REPLICATED])
        return planner.enter(body, [*used, *carry]).results

    def is_needed(place: int) -> bool:
        in_test = planner.is_completed_arg(cond, first + place)
        return in_test or planner.is_completed_arg(body, last - first + place)

    carry = _standing(view.labels[last:], turn, is_needed)
    test = planner.enter(cond, [*tested, *carry], [REPLICATED])
    plan = planner.enter(body, [*used, *carry], carry)
    return along(view, (*test.args[:first], *plan.args[: last - first], *carry), *carry)


def _standing(
    carry: Sequence[Sharding],
    turn: Callable[[Sequence[Sharding]], Sequence[Sharding]],
    is_needed: Callable[[int], bool],
) -> list[Sharding]:
    """Returns the labels of carried values that an iteration preserves.

    A label changes at most three times: to rows or a summand, then to complete if that fails, then
    to varying. `turn` maps the labels at the start of an iteration to those at its end; `is_needed`
    is whether an iteration needs the value at a place complete.
    """
    complete: set[int] = set()
    while True:
        ends = turn(carry)
        joined = []
        for place, both in enumerate(zip(carry, ends, strict=True)):
            label = common_sharding(both)
            if is_needed(place) or label not in both:
                complete.add(place)
            joined.append(completed(label) if place in complete else label)
        if joined == list(carry):
            return joined
        carry = joined


def _over_rows(
    planner: PropagationContext, view: OperatorView, first: int, last: int
) -> OperatorSharding:
    """Scans each device's rows, unless one row needs the result of another."""
    body = block_at(planner, view, "body")
    planner.run_alone(body)
    adding = accumulators(body, first, last)
    if adding is None:
        why = "the loop carries values from row to row, so every device goes over all rows"
        return gathered(view, why)
    carry = [
        SUM if place in adding else completed(label)
        for place, label in enumerate(view.labels[first:last])
    ]
    consts = [completed(label) for label in view.labels[:first]]
    rows = [sharded(0)] * (len(view.labels) - last)
    length = view.mesh.part(view.shapes[view.labels.index(sharded(0), last)][0])
    outputs = [*carry, *[sharded(0)] * (len(view.out_shapes) - len(carry))]
    placing = along(view, [*consts, *carry, *rows], *outputs, length=length)
    reads_rows = any(label.is_sharded for label in view.labels[:last])
    return placing.noting("each turn of the loop reads all rows") if reads_rows else placing


def _moved(label: Sharding, by: int) -> Sharding:
    return sharded(label.axis + by) if label.is_sharded else label


Rule: TypeAlias = Callable[[PropagationContext, OperatorView], OperatorSharding]


def control_flow_sharding(planner: PropagationContext, view: OperatorView) -> OperatorSharding:
    """Returns the sharding of an operator with sub-blocks."""
    return _RULES.get(view.op.type, _alone)(planner, view)


def _remat(planner: PropagationContext, view: OperatorView) -> OperatorSharding:
    plan = planner.enter(block_at(planner, view, "body"), view.labels)
    return along(view, plan.args, *plan.results)


def _cond(planner: PropagationContext, view: OperatorView) -> OperatorSharding:
    """Passes values that any branch needs complete as complete into all branches.

    A sum that one branch makes is completed there, if it must be complete afterwards and another
    branch returns a complete value: taking that other branch then costs no all-reduce.
    """
    blocks, args = blocks_of(planner, view), list(view.labels[1:])
    while True:
        plans = [planner.enter(block, args) for block in blocks]
        settled = [
            completed(label)
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


def _joined(view: OperatorView, plans: Sequence[BlockPlan], place: int) -> Sharding:
    """Returns the layout of a result that fits every branch."""
    label = common_sharding(plan.found[place] for plan in plans)
    is_there = any(plan.found[place] == REPLICATED and place not in plan.zeros for plan in plans)
    return completed(label) if label.is_sum and is_there and place in view.needed else label


def _reduce(planner: PropagationContext, view: OperatorView) -> OperatorSharding:
    """Keeps rows if the reduced axes are not cut."""
    planner.run_alone(block_at(planner, view, "body"))
    axes, half = view.ints("dimensions"), len(view.labels) // 2
    cut = {label.axis for label in view.labels if label.is_sharded}
    if len(cut) != 1 or not cut.isdisjoint(axes):
        return gathered(view, "the reduction is over rows of the batch")
    (axis,) = cut
    inputs = [*[sharded(axis)] * half, *(completed(label) for label in view.labels[half:])]
    return along(view, inputs, *[sharded(axis - sum(place < axis for place in axes))] * half)


def _alone(planner: PropagationContext, view: OperatorView) -> OperatorSharding:
    for block in blocks_of(planner, view):
        planner.run_alone(block)
    return gathered(view, f"no rule keeps the rows of {view.op.type} apart")


_RULES: Mapping[str, Rule] = {
    "jax.remat2": _remat,
    "jax.cond": _cond,
    "jax.reduce": _reduce,
    "jax.scan": scan,
    "jax.while": while_loop,
}

"""Rules for loops: what a loop carries lies the same way at the end of a turn as at its start.

Its labels are found by going round until they stand.
"""

from collections.abc import Callable, Sequence

from jaxfleet.analysis.labels.accumulate import accumulators
from jaxfleet.analysis.labels.label import REPLICATED, SUM, Label, agreed, settle, sharded
from jaxfleet.analysis.labels.placing import Placing, View, along, gathered
from jaxfleet.analysis.labels.planner import Planner, block_at


def scan(planner: Planner, view: View) -> Placing:
    """Goes over what is not cut with rows and summands carried; or over rows, on each device."""
    body = block_at(planner, view, "body")
    first, last = view.number("num_consts"), view.number("num_consts") + view.number("num_carry")
    if sharded(0) in view.labels[last:]:
        return _over_rows(planner, view, first, last)
    consts, xs = view.labels[:first], [_sliced(label) for label in view.labels[last:]]

    def turn(carry: Sequence[Label]) -> Sequence[Label]:
        return planner.enter(body, [*consts, *carry, *xs]).results[: last - first]

    def is_needed(place: int) -> bool:
        return planner.is_completed_arg(body, first + place)

    carry = _standing(view.labels[first:last], turn, is_needed)
    plan = planner.enter(body, [*consts, *carry, *xs])
    stacks = plan.found[last - first :]
    plan = planner.enter(body, plan.args, [*carry, *stacks])
    inputs = [*plan.args[:last], *(_stacked(label) for label in plan.args[last:])]
    return along(view, inputs, *carry, *(_stacked(label) for label in stacks))


def while_loop(planner: Planner, view: View) -> Placing:
    """Goes on with rows and summands carried, until what all devices agree on."""
    cond, body = block_at(planner, view, "cond"), block_at(planner, view, "body")
    first, last = view.number("cond_nconsts"), view.number("body_nconsts")
    last += first
    tested, used = view.labels[:first], view.labels[first:last]

    def turn(carry: Sequence[Label]) -> Sequence[Label]:
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
    carry: Sequence[Label],
    turn: Callable[[Sequence[Label]], Sequence[Label]],
    is_needed: Callable[[int], bool],
) -> list[Label]:
    """Returns labels of what is carried that a turn leaves as they are.

    A label changes at most three times: to rows or a summand, to complete where that does not
    hold, to a device's own.

    Args:
        carry: the labels before the first turn.
        turn: returns labels at the end of a turn from those at its start.
        is_needed: tells whether a turn needs a place complete.
    """
    complete: set[int] = set()
    while True:
        ends = turn(carry)
        joined = []
        for place, both in enumerate(zip(carry, ends, strict=True)):
            label = agreed(both)
            if is_needed(place) or label not in both:
                complete.add(place)
            joined.append(settle(label) if place in complete else label)
        if joined == list(carry):
            return joined
        carry = joined


def _over_rows(planner: Planner, view: View, first: int, last: int) -> Placing:
    """Goes over each device's rows, unless one row needs what another left."""
    body = block_at(planner, view, "body")
    planner.run_alone(body)
    adding = accumulators(body, first, last)
    if adding is None:
        why = "the loop carries values from row to row, so every device goes over all rows"
        return gathered(view, why)
    carry = [
        SUM if place in adding else settle(label)
        for place, label in enumerate(view.labels[first:last])
    ]
    consts = [settle(label) for label in view.labels[:first]]
    rows = [sharded(0)] * (len(view.labels) - last)
    length = view.mesh.part(view.shapes[view.labels.index(sharded(0), last)][0])
    outputs = [*carry, *[sharded(0)] * (len(view.out_shapes) - len(carry))]
    placing = along(view, [*consts, *carry, *rows], *outputs, length=length)
    reads_rows = any(label.is_sharded for label in view.labels[:last])
    return placing.noting("each turn of the loop reads all rows") if reads_rows else placing


def _sliced(label: Label) -> Label:
    return sharded(label.axis - 1) if label.is_sharded else label


def _stacked(label: Label) -> Label:
    return sharded(label.axis + 1) if label.is_sharded else label

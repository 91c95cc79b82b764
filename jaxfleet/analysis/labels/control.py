"""Rules for loops, branches and recomputation: the sub-block is planned with what goes in.

What a loop carries must lie the same way at the end of a turn as at its start, so its labels are
found by going round until they stand.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jaxfleet.analysis.labels.label import (
    REPLICATED,
    VARYING,
    Label,
    Layout,
    Mesh,
    Placing,
    View,
    settle,
    sharded,
)
from jaxfleet.analysis.labels.plan import BlockPlan
from jaxfleet.ir import Block, BlockRef, Program

_ROUNDS = 8  # of a loop's labels; each round moves some label up a ladder of three


class Planner(Protocol):
    """What control flow needs of the inference."""

    program: Program
    mesh: Mesh

    def enter(
        self, block: Block, args: Sequence[Label], results: Sequence[Label] | None = None
    ) -> BlockPlan:
        """Plans a block that is a function."""
        ...

    def is_completed_arg(self, block: Block, place: int) -> bool:
        """Tells whether a block needs an argument complete."""
        ...


def place(planner: Planner, view: View) -> Placing:
    """Returns how an operator with sub-blocks runs on the devices."""
    return _RULES.get(view.op.type, _whole)(planner, view)


def _remat(planner: Planner, view: View) -> Placing:
    plan = planner.enter(_block(planner, view, "body"), view.labels)
    return Placing(plan.args, plan.results, view.mesh.full_attrs(view.op.attrs))


def _scan(planner: Planner, view: View) -> Placing:
    body = _block(planner, view, "body")
    consts, carries = _count(view, "num_consts"), _count(view, "num_carry")
    by_row = any(label == sharded(0) for label in view.labels[consts + carries :])
    if by_row and carries:
        return _whole(planner, view, note="the loop goes over the rows of the batch in order")
    if by_row:
        return _map(planner, view, body, consts)
    outer = list(view.labels)
    inner = [*outer[: consts + carries], *(_sliced(label) for label in outer[consts + carries :])]
    forced: set[int] = set()
    for _ in range(_ROUNDS):
        plan = planner.enter(body, inner)
        carry = inner[consts : consts + carries]
        joined = [
            _joined(planner, body, consts + i, label, plan.results[i], forced, view)
            for i, label in enumerate(carry)
        ]
        if joined == carry:
            break
        inner[consts : consts + carries] = joined
    carry = list(plan.args[consts : consts + carries])
    ys = [_unforced(label) for label in plan.found[carries:]]
    plan = planner.enter(body, plan.args, [*carry, *ys])
    wanted = [*plan.args[: consts + carries], *(_stacked(x) for x in plan.args[consts + carries :])]
    outputs = (*carry, *(_stacked(label) for label in ys))
    return Placing(tuple(wanted), outputs, view.mesh.full_attrs(view.op.attrs))


def _map(planner: Planner, view: View, body: Block, consts: int) -> Placing:
    """Goes over this device's rows, which do not see each other."""
    wanted = [
        *(settle(label) for label in view.labels[:consts]),
        *[sharded(0)] * (len(view.labels) - consts),
    ]
    inner = [*wanted[:consts], *[VARYING] * (len(view.labels) - consts)]
    plan = planner.enter(body, inner)
    planner.enter(body, plan.args, [VARYING] * len(plan.found))
    length = view.mesh.part(view.shapes[consts][0])
    attrs = view.mesh.full_attrs(view.op.attrs).updated(length=length)
    return Placing(tuple(wanted), (sharded(0),) * len(view.out_shapes), attrs)


def _cond(planner: Planner, view: View) -> Placing:
    refs = view.op.attrs["branches"]
    assert isinstance(refs, tuple)
    blocks = [planner.program.blocks[ref.index] for ref in refs if isinstance(ref, BlockRef)]
    args = list(view.labels[1:])
    for _ in range(_ROUNDS):
        plans = [planner.enter(block, args) for block in blocks]
        agreed = [_agreed([plan.args[i] for plan in plans]) for i in range(len(args))]
        if agreed == args:
            break
        args = agreed
    count = len(view.out_shapes)
    results = [_agreed([plan.found[i] for plan in plans]) for i in range(count)]
    for block in blocks:
        planner.enter(block, args, results)
    attrs = view.mesh.full_attrs(view.op.attrs)
    return Placing((settle(view.labels[0]), *args), tuple(results), attrs)


def _while(planner: Planner, view: View) -> Placing:
    cond, body = _block(planner, view, "cond"), _block(planner, view, "body")
    cond_count, body_count = _count(view, "cond_nconsts"), _count(view, "body_nconsts")
    first = cond_count + body_count
    cond_consts, body_consts = list(view.labels[:cond_count]), list(view.labels[cond_count:first])
    carry = list(view.labels[first:])
    forced: set[int] = set()
    for _ in range(_ROUNDS):
        test = planner.enter(cond, [*cond_consts, *carry], [REPLICATED])
        turn = planner.enter(body, [*body_consts, *carry])
        joined = []
        for i, label in enumerate(carry):
            completed = planner.is_completed_arg(cond, cond_count + i)
            if completed:
                forced.add(body_count + i)
            found = turn.results[i]
            joined.append(_joined(planner, body, body_count + i, label, found, forced, view))
        if joined == carry:
            break
        carry = joined
    planner.enter(body, [*body_consts, *carry], carry)
    inputs = (*test.args[:cond_count], *turn.args[:body_count], *carry)
    return Placing(inputs, tuple(carry), view.mesh.full_attrs(view.op.attrs))


def _whole(planner: Planner, view: View, note: str = "") -> Placing:
    """Runs the operator whole on every device, its sub-blocks too."""
    for index in view.op.blocks:
        block = planner.program.blocks[index]
        planner.enter(block, [REPLICATED] * len(block.args), [REPLICATED] * len(block.results))
    cut = any(label.is_sharded for label in view.labels)
    why = note or f"no rule keeps the rows of {view.op.type} apart"
    inputs = tuple(settle(label) for label in view.labels)
    outputs = (view.settled,) * len(view.out_shapes)
    return Placing(inputs, outputs, view.mesh.full_attrs(view.op.attrs), note=why if cut else "")


def _joined(
    planner: Planner,
    body: Block,
    place: int,
    start: Label,
    end: Label,
    forced: set[int],
    view: View,
) -> Label:
    """Returns how a carried value lies, given its label before and after a turn."""
    if planner.is_completed_arg(body, place):
        forced.add(place)
    if place in forced:
        return REPLICATED
    shape = body.variables[body.args[place]].shape
    label = _agreed([start, end])
    cuttable = not label.is_sharded or view.mesh.part(shape[label.axis]) is not None
    if label != start and label != end or not cuttable:
        forced.add(place)
        return REPLICATED
    return label


def _agreed(labels: Sequence[Label]) -> Label:
    """Returns the label that all can be brought to at the least cost."""
    found = {_unforced(label) for label in labels}
    if len(found) == 1:
        return found.pop()
    found.discard(REPLICATED)
    if len(found) == 1:
        return found.pop()
    return VARYING if found and all(x.layout is Layout.VARYING for x in found) else REPLICATED


def _unforced(label: Label) -> Label:
    """Returns a label that a value may keep outside the block that it was made in."""
    return REPLICATED if label.layout is Layout.PARTIAL and not label.is_sum else label


def _sliced(label: Label) -> Label:
    return sharded(label.axis - 1) if label.is_sharded else label


def _stacked(label: Label) -> Label:
    return sharded(label.axis + 1) if label.is_sharded else label


def _block(planner: Planner, view: View, name: str) -> Block:
    ref = view.op.attrs[name]
    assert isinstance(ref, BlockRef)
    return planner.program.blocks[ref.index]


def _count(view: View, name: str) -> int:
    return int(str(view.op.attrs[name]))


_RULES: Mapping[str, Callable[[Planner, View], Placing]] = {
    "jax.remat2": _remat,
    "jax.scan": _scan,
    "jax.cond": _cond,
    "jax.while": _while,
}

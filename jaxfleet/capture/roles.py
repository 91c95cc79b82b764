"""Roles of operators, and their order by role.

Backward operators are those that jax's name stack marks as transposed, up to the markers; optimize
operators follow from the markers, or feed only the optimizer; inputs of its scalars alone (a
schedule, a step counter) are the learning-rate schedule.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from jaxfleet.capture.draft import MARK
from jaxfleet.ir import Operator, Role, Variable

_UNKNOWN = -1  # a number of elements that depends on the batch
# Operators that select or scatter elements.
_MOVES = frozenset(
    f"jax.{name}"
    for name in (
        *("slice", "dynamic_slice", "gather", "split", "concatenate", "reshape", "transpose"),
        *("squeeze", "pad", "dynamic_update_slice", "scatter", "convert_element_type", "copy"),
    )
)
_RANK = {Role.FORWARD: 0, Role.BACKWARD: 1, Role.LR_SCHED: 2, Role.OPTIMIZE: 3}


def assign_roles(
    ops: Sequence[Operator],
    *,
    types: Mapping[str, Variable],
    data: Iterable[str],
    returned: Iterable[str],
    updated: Collection[str] = (),
) -> list[Operator]:
    """Returns the operators with their roles, sorted by role where dependencies allow.

    `ops` are in single-assignment form, markers included; `updated` are the outputs of loops and
    branches that contain an update.
    """
    before = _ancestors(ops)
    marked = {name for op in ops if op.type == MARK for name in op.writes}
    after = _descendants(ops, {*marked, *updated})
    after |= {at for at, op in enumerate(ops) if not set(op.writes).isdisjoint(updated)}
    fed = _descendants(ops, set(data))
    roles: list[Role] = []
    producers: dict[str, Role] = {}
    needed = set(returned)
    feeds_optimizer = _feeds_only_the_optimizer(ops, before, after, fed, needed)
    for place, op in enumerate(ops):
        if place in before:
            role = op.role
        elif place in after:
            role = Role.OPTIMIZE
        elif place in feeds_optimizer:
            role = Role.LR_SCHED if _is_scalar(op, types) else Role.OPTIMIZE
        else:
            role = op.role
        if role is Role.FORWARD and any(producers.get(x) is Role.BACKWARD for x in op.reads):
            role = Role.BACKWARD
        roles.append(role)
        producers.update(dict.fromkeys(op.writes, role))
    with_roles = [replace(op, role=role) for op, role in zip(ops, roles, strict=True)]
    return _sorted(with_roles, producers)


def unmarked(
    ops: Sequence[Operator], types: Mapping[str, Variable], updated: Collection[str] = ()
) -> set[str]:
    """Returns the values that backward operators reach without passing a marker.

    Only floating-point values count: a finiteness test of gradients is not a gradient. Nor is a sum
    of
    gradients: their norm may weight losses, and trains nothing. Loops and branches that contain an
    update, and write `updated`, act as markers.
    """
    reached: set[str] = set()
    sums: set[str] = set()
    for op in ops:
        if op.type == MARK or not set(op.writes).isdisjoint(updated):
            continue
        made = [name for name in op.writes if _is_float(types[name])]
        if op.role is Role.BACKWARD:
            reached.update(made)
        elif _adds_to(op, sums) or (_is_sum(op, types) and not reached.isdisjoint(op.reads)):
            sums.update(made)  # even of a single element, as the gradient of a bias may be
        elif _hands_on(op, reached, types):
            reached.update(made)
    return reached


def _is_sum(op: Operator, types: Mapping[str, Variable]) -> bool:
    reduces = op.type.startswith("jax.reduce_") or op.type == "jax.dot_general"
    return reduces and all(_elements(types[name]) == 1 for name in op.writes)


def _adds_to(op: Operator, sums: set[str]) -> bool:
    """Whether an operator adds to sums of gradients, as a norm over several leaves does."""
    return op.type in {"jax.add", "jax.add_any"} and not sums.isdisjoint(op.reads)


def _hands_on(op: Operator, gradients: set[str], types: Mapping[str, Variable]) -> bool:
    """Whether an operator's result on gradients may still update a parameter."""
    read = [_elements(types[name]) for name in gradients.intersection(op.reads)]
    if not read or op.blocks or op.type in _MOVES:
        return bool(read)
    made = max(_elements(types[name]) for name in op.writes)
    return made == _UNKNOWN or made >= min(read)


def _elements(variable: Variable) -> int:
    sizes = [size for size in variable.shape if isinstance(size, int)]
    return prod(sizes) if len(sizes) == len(variable.shape) else _UNKNOWN


def _is_float(variable: Variable) -> bool:
    return variable.dtype.lstrip("b").startswith("f")


def ancestors_of(ops: Sequence[Operator], names: Iterable[str]) -> set[str]:
    """Returns every variable that the named ones depend on, themselves included."""
    needed = set(names)
    for op in reversed(ops):
        if needed.intersection(op.writes):
            needed.update(op.reads)
    return needed


def _ancestors(ops: Sequence[Operator]) -> set[int]:
    """Returns the positions of operators that some marker depends on, markers included."""
    needed: set[str] = set()
    places: set[int] = set()
    for place in reversed(range(len(ops))):
        op = ops[place]
        if op.type == MARK or needed.intersection(op.writes):
            needed.update(op.reads)
            places.add(place)
    return places


def _descendants(ops: Sequence[Operator], names: set[str]) -> set[int]:
    reached = set(names)
    places: set[int] = set()
    for place, op in enumerate(ops):
        if reached.intersection(op.reads):
            reached.update(op.writes)
            places.add(place)
    return places


def _feeds_only_the_optimizer(
    ops: Sequence[Operator], before: set[int], after: set[int], fed: set[int], returned: set[str]
) -> set[int]:
    """Returns the positions of operators that feed only the optimizer or the next step."""
    elsewhere = set(returned)
    places: set[int] = set()
    for place in reversed(range(len(ops))):
        op = ops[place]
        if place in after:
            continue
        if place in before or place in fed or elsewhere.intersection(op.writes):
            elsewhere.update(op.reads)
        else:
            places.add(place)
    return places


def _is_scalar(op: Operator, types: Mapping[str, Variable]) -> bool:
    return all(types[name].shape == () for name in (*op.reads, *op.writes))


def _sorted(ops: list[Operator], producers: Mapping[str, Role]) -> list[Operator]:
    """Returns the operators sorted by role, unless that would read a value before it is written."""
    for op in ops:
        if any(_RANK[producers[name]] > _RANK[op.role] for name in op.reads if name in producers):
            return ops
    return sorted(ops, key=lambda op: _RANK[op.role])

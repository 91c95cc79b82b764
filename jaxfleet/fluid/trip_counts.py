"""How many turns a `while` takes at most, where its operators tell.

A counter begins with a constant, grows by a constant in each turn, and is compared with a constant:
nearly every loop of fluid is so. Values are followed through the block as a constant, or as what a
variable held when the turn began plus a number.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxfleet.fluid.block import Block
from jaxfleet.fluid.operator import Operator


@dataclass(frozen=True)
class _Sum:
    """What a variable held at the beginning, and a number added to it; `name` empty: the number."""

    name: str
    more: float


@dataclass(frozen=True)
class _Truth:
    """A comparison of two sums, or several of which all hold."""

    kind: str  # less_than, less_equal, all
    parts: tuple[Any, ...]


_Value: TypeAlias = _Sum | _Truth | None


def most_trips(loop: Operator) -> int | None:
    """Returns how many turns a `while` takes at most; None where that is not known."""
    block: Block = loop.attrs["sub_block"]
    names = set(loop.output_arg_names)
    values = _followed(block, names)
    truth = values.get(loop.input("Condition")[0])
    if not isinstance(truth, _Truth):
        return None
    found = [count for one in _conjuncts(truth) if (count := _trips(loop, one, values)) is not None]
    return min(found, default=None)


def largest_index(loop: Operator, op: Operator, name: str) -> int | None:
    """Returns the largest number that a variable may hold where an operator of a `while` reads it.

    Args:
        loop: the `while`.
        op: an operator of its block, or of one within that.
        name: the variable.
    """
    block: Block = loop.attrs["sub_block"]
    ops = [op] if op.block is block else [x for x in block.ops if op.block in x._inner_blocks()]
    value = _followed(block, {name}, until=ops[0] if ops else None)[name]
    if op.block is not block and name not in block.vars and not ops:
        return None
    if ops and ops[0] is not op and name in ops[0].output_arg_names:
        return None  # the block within changes it, before the operator reads it or after
    if not isinstance(value, _Sum):
        return None
    if not value.name:
        return math.ceil(value.more)
    step, begun = _step(loop, value.name), constant_before(loop.block, value.name, loop)
    trips = most_trips(loop) if step else 1
    if step is None or begun is None or trips is None:
        largest = _held_below(loop, value.name)
        return None if largest is None else math.ceil(largest + value.more)
    return math.ceil(begun + max(step, 0) * (trips - 1) + value.more)


def _held_below(loop: Operator, name: str) -> int | None:
    """Returns the largest number that a counter may hold as a turn begins, by the condition.

    The loop may be in another, where its counter goes on from what it was.
    """
    condition, written = loop.input("Condition")[0], set(loop.output_arg_names)
    values = _followed(loop.attrs["sub_block"], written)
    truth, after = values.get(condition), values.get(name)
    first = _writer_before(loop.block, condition, loop)
    if not isinstance(truth, _Truth) or first is None or after is None:
        return None
    begun = _made(first, [_Sum(each, 0.0) for each in first.input_arg_names])
    for one in _conjuncts(truth):
        counter, limit = one.parts
        if counter != after or not isinstance(limit, _Sum) or limit.name in written:
            continue
        if begun != _Truth(one.kind, (_Sum(name, 0.0), limit)):
            continue
        end = constant_before(loop.block, limit.name, loop) if limit.name else 0.0
        if end is not None:
            end += limit.more
            return math.ceil(end) - 1 if one.kind == "less_than" else math.floor(end)
    return None


def _writer_before(block: Block, name: str, before: Operator) -> Operator | None:
    """Returns the last operator that writes a variable before another, in its block or around."""
    at = next((at for at, op in enumerate(block.ops) if op is before), len(block.ops))
    found = [op for op in block.ops[:at] if name in op.output_arg_names]
    if found or block.parent_idx < 0:
        return found[-1] if found else None
    outer = block.program.block(block.parent_idx)
    owner = next((op for op in outer.ops if block in op._inner_blocks()), before)
    return _writer_before(outer, name, owner)


def constant_before(block: Block, name: str, before: Operator) -> float | None:
    """Returns the number that a variable holds before an operator; None if it is not known."""
    at = next((at for at, op in enumerate(block.ops) if op is before), len(block.ops))
    for place in range(at - 1, -1, -1):
        op = block.ops[place]
        if name not in op.output_arg_names:
            continue
        return _constant_of(block, op)
    if block.parent_idx < 0 or block.has_var(name):
        return None
    outer = block.program.block(block.parent_idx)
    owner = next((op for op in outer.ops if block in op._inner_blocks()), None)
    if owner is not None and name in owner.output_arg_names:
        return None
    return constant_before(outer, name, owner or before)


def _constant_of(block: Block, op: Operator) -> float | None:
    match op.type:
        case "fill_constant":
            return float(op.attr("value"))
        case "assign_value":
            values = op.attr("values")
            return float(values[0]) if len(values) == 1 else None
        case "assign" | "cast":
            return constant_before(block, op.input("X")[0], op)
        case "increment":
            begun = constant_before(block, op.input("X")[0], op)
            return None if begun is None else begun + float(op.attr("step"))
    return None


def _step(loop: Operator, name: str) -> float | None:
    """Returns what a turn adds to a variable."""
    if name not in loop.output_arg_names:
        return 0.0
    value = _followed(loop.attrs["sub_block"], set(loop.output_arg_names)).get(name)
    return value.more if isinstance(value, _Sum) and value.name == name else None


def _followed(block: Block, names: set[str], until: Operator | None = None) -> dict[str, _Value]:
    """Returns what variables hold at the end of a block, or before one of its operators."""
    values: dict[str, _Value] = {}

    def of(name: str) -> _Value:
        return values[name] if name in values else _Sum(name, 0.0)

    for op in block.ops:
        if op is until:
            break
        made = _made(op, [of(name) for name in op.input_arg_names])
        values.update(dict.fromkeys(op.output_arg_names, made))
    return {name: of(name) for name in names}


def _made(op: Operator, read: list[_Value]) -> _Value:
    first = read[0] if read else None
    match op.type:
        case "fill_constant":
            return _Sum("", float(op.attr("value")))
        case "assign" | "cast":
            return first
        case "increment" if isinstance(first, _Sum):
            return _Sum(first.name, first.more + float(op.attr("step")))
        case "scale" if isinstance(first, _Sum) and op.attr("scale") == 1.0:
            return _Sum(first.name, first.more + float(op.attr("bias")))
        case "elementwise_add" if all(isinstance(x, _Sum) for x in read):
            left, right = read
            assert isinstance(left, _Sum)
            assert isinstance(right, _Sum)
            if not left.name or not right.name:
                return _Sum(left.name or right.name, left.more + right.more)
        case "less_than" | "less_equal":
            return _Truth(op.type, tuple(read))
        case "greater_than" | "greater_equal":
            return _Truth(op.type.replace("greater", "less"), tuple(reversed(read)))
        case "logical_and":
            return _Truth("all", tuple(read))
    return None


def _conjuncts(truth: _Truth) -> Iterator[_Truth]:
    if truth.kind != "all":
        yield truth
        return
    for part in truth.parts:
        if isinstance(part, _Truth):
            yield from _conjuncts(part)


def _trips(loop: Operator, truth: _Truth, values: dict[str, _Value]) -> int | None:
    """Returns after how many turns a comparison at the end of a turn fails, at the latest."""
    counter, limit = truth.parts
    if not isinstance(counter, _Sum) or not isinstance(limit, _Sum) or not counter.name:
        return None
    step, begun = _step(loop, counter.name), constant_before(loop.block, counter.name, loop)
    end = limit.more
    if limit.name:
        fixed = None if limit.name in values else constant_before(loop.block, limit.name, loop)
        if fixed is None:
            return None
        end += fixed
    if step is None or begun is None or step <= 0:
        return None
    if not all(x.is_integer() for x in (begun, counter.more, step, end)):
        return None  # sums of fractions are rounded at run time: ten times 0.1 is not 1
    turns = (end - begun - counter.more) / step
    more = math.ceil(turns) if truth.kind == "less_than" else math.floor(turns) + 1
    return 1 + max(more, 0)

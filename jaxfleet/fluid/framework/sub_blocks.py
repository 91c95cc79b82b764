"""Sub-blocks under differentiation: bounds on a loop's trip count, copies for gradient operators.

Nearly every loop in fluid has a counter that starts at a constant, is incremented by a constant in
each trip, and is compared with a constant. The analysis follows values through the block as either
a constant, or a variable's value at the start of the trip plus a number.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.operator import ROLE, ROLE_VAR, Operator, OpRole
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.ops.fluid import RANDOM_OPS, schema_of
from jaxfleet.ops.fluid.arrays import DRAWS_AS


@dataclass(frozen=True)
class _Sum:
    """The initial value of a variable plus a number; a constant if `name` is empty."""

    name: str
    more: float


@dataclass(frozen=True)
class _Truth:
    """A comparison of two sums, or a conjunction of comparisons."""

    kind: str  # less_than, less_equal, all
    parts: tuple[Any, ...]


_Value: TypeAlias = _Sum | _Truth | None


def max_trip_count(loop: Operator) -> int | None:
    """Returns an upper bound on the trips of a `while`; None if there is no known bound."""
    block: Block = loop.attrs["sub_block"]
    names = set(loop.output_arg_names)
    values = _followed(block, names)
    truth = values.get(loop.input("Condition")[0])
    if not isinstance(truth, _Truth):
        return None
    found = [count for one in _conjuncts(truth) if (count := _trips(loop, one, values)) is not None]
    return min(found, default=None)


def max_index(loop: Operator, op: Operator, name: str) -> int | None:
    """Returns the largest value of a variable when an operator of a `while` reads it.

    The operator may be in a nested block.
    """
    block: Block = loop.attrs["sub_block"]
    ops = [op] if op.block is block else [x for x in block.ops if op.block in x._inner_blocks()]
    value = _followed(block, {name}, until=ops[0] if ops else None)[name]
    if op.block is not block and name not in block.vars and not ops:
        return None
    if ops and ops[0] is not op and name in ops[0].output_arg_names:
        return None  # the nested block changes it, before the operator reads it or after
    if not isinstance(value, _Sum):
        return None
    if not value.name:
        return math.ceil(value.more)
    step, begun = _step(loop, value.name), constant_before(loop.block, value.name, loop)
    trips = max_trip_count(loop) if step else 1
    if step is None or begun is None or trips is None:
        largest = _held_below(loop, value.name)
        return None if largest is None else math.ceil(largest + value.more)
    return math.ceil(begun + max(step, 0) * (trips - 1) + value.more)


def _held_below(loop: Operator, name: str) -> int | None:
    """Returns the largest value of a counter at the start of a trip, given the condition.

    In a nested loop, the counter continues from its previous value.
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
    """Returns the last operator before another that writes a variable, here or further out."""
    at = next((at for at, op in enumerate(block.ops) if op is before), len(block.ops))
    found = [op for op in block.ops[:at] if name in op.output_arg_names]
    if found or block.parent_idx < 0:
        return found[-1] if found else None
    outer = block.program.block(block.parent_idx)
    owner = next((op for op in outer.ops if block in op._inner_blocks()), before)
    return _writer_before(outer, name, owner)


def constant_before(block: Block, name: str, before: Operator) -> float | None:
    """Returns the constant that a variable holds before an operator; None if not known."""
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
    if name not in loop.output_arg_names:
        return 0.0
    value = _followed(loop.attrs["sub_block"], set(loop.output_arg_names)).get(name)
    return value.more if isinstance(value, _Sum) and value.name == name else None


def _followed(block: Block, names: set[str], until: Operator | None = None) -> dict[str, _Value]:
    """Returns the values of variables at the end of a block, or before one of its operators."""
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
    """Returns an upper bound on the trips until a comparison at the end of a trip fails."""
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


def block_attributes(op: Operator, ended: frozenset[str]) -> dict[str, Any]:
    """Returns the attributes that give a gradient operator its copy of the sub-block."""
    schema = schema_of(op.type)
    assert schema is not None
    copy, names = _copied(op, ended)
    read = [name for slot in schema.inputs for name in op.input(slot.name)]
    written = [name for slot in schema.outputs for name in op.output(slot.name)]
    attrs: dict[str, Any] = {
        "sub_block": copy,
        "reads": [names.get(name, name) for name in read],
        "writes": [names.get(name, name) for name in written],
    }
    return {**attrs, "max_trips": max_trip_count(op) or 0} if op.type == "while" else attrs


def _copied(op: Operator, ended: frozenset[str]) -> tuple[Block, dict[str, str]]:
    """Copies an operator's block; also returns the new names of variables from outside."""
    inner: Block = op.attrs["sub_block"]
    made = _copy_of(inner, op.block.idx)
    outer = {*op.input_arg_names, *op.output_arg_names}
    names = {name: f"{name}@BLOCK{made.idx}" for name in outer if not inner.has_var(name)}
    for name, own in names.items():
        like = op.block._find_var_recursive(name)
        if like is not None:
            _declare(made, own, like)
    _rename(made, names)
    _end_gradients(made, {names.get(name, name) for name in ended})
    return made, names


def _copy_of(block: Block, parent: int) -> Block:
    """Copies a block and those nested in it, with backward roles."""
    program = block.program
    here = program.current_block_idx
    made = program._create_block(parent)
    program.current_block_idx = here
    made.vars = {name: v._copied(made) for name, v in block.vars.items()}
    for at, op in enumerate(block.ops):
        if op.type in RANDOM_OPS and not op.attr("seed"):
            op.attrs.setdefault(DRAWS_AS, (1 << 20) + (block.idx << 10) + at)
        own = op._copied(made)
        if op.type == "print":  # the forward block has already printed it
            own = Operator(made, "assign", {"X": op.input("In")}, op.outputs, {}, op.source)
        own.attrs[ROLE], own.attrs[ROLE_VAR] = OpRole.BACKWARD, []
        if "sub_block" in own.attrs:
            own.attrs["sub_block"] = _copy_of(own.attrs["sub_block"], made.idx)
        if op.type == "while":
            own.attrs["max_trips"] = max_trip_count(op) or 0
        made.ops.append(own)
    return made


def _declare(block: Block, name: str, like: Variable) -> None:
    made = block.create_var(name=name, dtype=like.dtype, stop_gradient=like.stop_gradient)
    made.type, made.sizes, made.lod_level = like.type, like.sizes, like.lod_level


def _rename(block: Block, names: Mapping[str, str]) -> None:
    """Renames the operands of operators in a block and those nested in it."""
    for op in block.ops:
        op.inputs = {slot: [names.get(n, n) for n in many] for slot, many in op.inputs.items()}
        op.outputs = {slot: [names.get(n, n) for n in many] for slot, many in op.outputs.items()}
        for inner in op._inner_blocks():
            _rename(inner, names)


def _end_gradients(block: Block, ended: set[str]) -> None:
    """Adds an operator after each one that writes a variable at which gradients end."""
    made: list[Operator] = []
    for op in block.ops:
        made.append(op)
        for inner in op._inner_blocks():
            _end_gradients(inner, ended)
        for name in dict.fromkeys(op.output_arg_names):
            variable = block._find_var_recursive(name)
            if variable is None or not variable.dtype.startswith(("float", "bfloat")):
                continue
            if variable.stop_gradient or name in ended:
                attrs = {ROLE: OpRole.BACKWARD, ROLE_VAR: []}
                slots = {"X": [name]}, {"Out": [name]}
                made.append(Operator(block, "stop_gradient", *slots, attrs, op.source))
    block.ops = made

"""Operators with sub-blocks, and their gradients.

A sub-block names variables around it as they are called there, and its operator lists what it reads
and writes of them. A gradient operator has a copy of the block, in which those variables are the
copy's own under names of their own: `reads` has these names in the order of the operator's inputs,
`writes` in that of its outputs. So its operands may be renamed, and may be earlier values of
variables that the block overwrites.

`Beside` has what a block reads that the layers do not know of: lengths of sequences, and the number
of the run that random operators draw by. `jaxfleet.fluid.closing` fills it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfleet.ir import Block, Operator, block_of
from jaxfleet.ops.fluid.gradients import define_block_gradient
from jaxfleet.ops.fluid.random import RUN
from jaxfleet.ops.fluid.reverse_loops import differentiable_while
from jaxfleet.ops.fluid.schema import Gradient, Schema, describe, slots
from jaxfleet.ops.registry import Array, Context, register_op

_NEXT_TURN = 0x85EBCA6B  # odd, and far from what tells devices apart
BESIDE = "Beside"  # slot, and in small letters the attribute of a gradient operator with the names


def names_read(op: Operator) -> tuple[str, ...]:
    """Returns what the sub-block of an operator calls the operator's inputs, in their order."""
    if "reads" not in op.attrs:
        return op.reads
    return (*_texts(op, "reads"), *_texts(op, BESIDE.lower()))


def names_written(op: Operator) -> tuple[str, ...]:
    """Returns what the sub-block of an operator calls the operator's outputs, in their order."""
    return _texts(op, "writes") if "writes" in op.attrs else op.writes


def sub_block(ctx: Context, op: Operator) -> Block:
    """Returns the block that an operator runs."""
    return block_of(ctx.program, op.attrs["sub_block"])


def values_held(op: Operator, values: Sequence[Array]) -> dict[str, Array]:
    """Returns an operator's inputs by the names that its sub-block has for them."""
    return dict(zip(names_read(op), values, strict=True))


def _texts(op: Operator, name: str) -> tuple[str, ...]:
    found: Any = op.attrs.get(name, ())
    return tuple(map(str, found))


def _begun(
    names: Sequence[str], held: Mapping[str, Array], run: Callable[[], Mapping[str, Array]]
) -> dict[str, Array]:
    """Returns what names hold before a block runs; zeros where nothing has made them."""
    missing = [name for name in names if name not in held]
    made = jax.eval_shape(run) if missing else {}
    zeros = {name: jnp.zeros(made[name].shape, made[name].dtype) for name in missing}
    return {name: zeros[name] if name in zeros else jnp.asarray(held[name]) for name in names}


def next_run(held: Mapping[str, Array]) -> dict[str, Array]:
    """Returns what random operators draw by in the next turn of a loop, if there are any."""
    return {RUN: held[RUN] + jnp.uint32(_NEXT_TURN)} if RUN in held else {}


@register_op("conditional_block")
def conditional_block(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Runs its block if `Cond` holds; else `Out` stays what it was, or is zero."""
    held, names = values_held(op, inputs), names_written(op)
    condition, block = _first_of(op, "Cond", inputs), sub_block(ctx, op)

    def run() -> dict[str, Array]:
        after = ctx.run_scope(block, held, keep=names)
        return {name: jnp.asarray(after[name]) for name in names}

    kept = _begun(names, held, run)
    made = jax.lax.cond(condition.reshape(()), run, lambda: kept)
    return [made[name] for name in names]


@register_op("while")
def while_op(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Runs its block for as long as `Condition` holds; `Out` is what the block changes."""
    held, names, block = values_held(op, inputs), names_written(op), sub_block(ctx, op)
    given = str(op.inputs.slot("Condition")[0])
    condition = dict(zip(op.reads, names_read(op), strict=True))[given]

    def once(carried: dict[str, Array], constant: dict[str, Array]) -> dict[str, Array]:
        values = {**constant, **carried}
        after = ctx.run_scope(block, values, keep=names)
        return {**{name: after[name] for name in names}, **next_run(values)}

    def goes_on(carried: dict[str, Array]) -> Array:
        return carried[condition].reshape(())

    before = _begun(names, held, lambda: once({}, held))
    before |= {name: held[name] for name in (RUN,) if name in held}
    constant = {name: x for name, x in held.items() if name not in before}
    trips = op.attrs.get("max_trips")
    if trips is None:
        after = jax.lax.while_loop(goes_on, lambda carried: once(carried, constant), before)
    elif trips:
        after = _bounded(int(str(trips)), goes_on, lambda x: once(x, constant), before)
    else:
        after = differentiable_while(goes_on, once, before, constant)
    return [after[name] for name in names]


def _bounded(
    trips: int,
    goes_on: Callable[[dict[str, Array]], Array],
    once: Callable[[dict[str, Array]], dict[str, Array]],
    before: dict[str, Array],
) -> dict[str, Array]:
    """Runs a loop of at most so many turns, in a form that reverse mode differentiates."""

    def turn(carried: dict[str, Array], _: None) -> tuple[dict[str, Array], None]:
        return jax.lax.cond(goes_on(carried), once, lambda x: x, carried), None

    after: dict[str, Array] = jax.lax.scan(turn, before, None, length=trips)[0]
    return after


def _first_of(op: Operator, slot: str, inputs: Sequence[Array]) -> Array:
    """Returns the first value in a slot."""
    rest = iter(inputs)
    return {name: [next(rest) for _ in operands] for name, operands in op.inputs.slots}[slot][0]


describe(
    Schema(
        "while",
        slots("Condition X*? Beside*?"),
        slots("Out*"),
        {"sub_block": None},
        Gradient("while_grad", ("Condition", "X", "Beside"), ("X",)),
    )
)
describe(
    Schema(
        "conditional_block",
        slots("Cond Input*? Beside*?"),
        slots("Out*"),
        {"sub_block": None, "is_scalar_condition": False},
        Gradient("conditional_block_grad", ("Cond", "Input", "Beside"), ("Input",)),
    )
)
define_block_gradient("while", {"max_trips": 0})
define_block_gradient("conditional_block")

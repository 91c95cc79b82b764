"""Operators with sub-blocks."""

from collections.abc import Sequence

import jax

from jaxfleet.ir import Operator, block_of
from jaxfleet.ops.fluid.schema import Schema, describe, slots
from jaxfleet.ops.registry import Array, Context, register_op


@register_op("conditional_block")
def conditional_block(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Runs its block if `Cond` holds; else `Out` stays what it was."""
    held = dict(zip(op.reads, inputs, strict=True))
    condition = held[str(op.inputs.slot("Cond")[0])]
    block = block_of(ctx.program, op.attrs["sub_block"])

    def run() -> list[Array]:
        after = ctx.run_scope(block, held)
        return [after[name] for name in op.writes]

    kept = [held[name] for name in op.writes]
    made: list[Array] = jax.lax.cond(condition.reshape(()), run, lambda: kept)
    return made


@register_op("while")
def while_op(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Runs its block for as long as `Condition` holds; `Out` is what the block changes."""
    held = dict(zip(op.reads, inputs, strict=True))
    condition = str(op.inputs.slot("Condition")[0])
    block = block_of(ctx.program, op.attrs["sub_block"])

    def once(changed: dict[str, Array]) -> dict[str, Array]:
        after = ctx.run_scope(block, {**held, **changed})
        return {name: after[name] for name in op.writes}

    before = {name: held[name] for name in op.writes}
    after = jax.lax.while_loop(lambda changed: changed[condition].reshape(()), once, before)
    return [after[name] for name in op.writes]


describe(Schema("while", slots("Condition X*"), slots("Out*"), {"sub_block": None}))
describe(
    Schema(
        "conditional_block",
        slots("Cond Input*"),
        slots("Out*"),
        {"sub_block": None, "is_scalar_condition": False},
    )
)

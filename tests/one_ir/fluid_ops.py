"""A dozen of fluid's operators, just far enough to train a line in a program of theirs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfleet.ir import Operator, block_of
from jaxfleet.ops import Array, Context, register_op
from jaxfleet.ops.jax_adapter import numpy_dtype


@register_op("mul")
def mul(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    x, y = inputs
    return [x @ y]


@register_op("elementwise_add")
def elementwise_add(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    x, y = inputs
    return [x + y]


@register_op("relu")
def relu(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    return [jnp.maximum(inputs[0], 0.0)]


@register_op("mean")
def mean(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    return [inputs[0].mean()]


@register_op("sgd")
def sgd(_: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    (param,), (grad,) = op.inputs.slot("Param"), op.inputs.slot("Grad")
    held = dict(zip(op.inputs, inputs, strict=True))
    (rate,) = op.inputs.slot("LearningRate")
    return [held[param] - held[rate] * held[grad]]


@register_op("fill_constant")
def fill_constant(_: Context, op: Operator, __: Sequence[Array]) -> Sequence[Array]:
    shape: Any = op.attrs["shape"]
    value: Any = op.attrs["value"]
    return [jnp.full(shape, value, numpy_dtype(str(op.attrs["dtype"])))]


@register_op("increment")
def increment(_: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    return [inputs[0] + op.attrs["step"]]


@register_op("less_than")
def less_than(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    x, y = inputs
    return [x < y]


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
    after = jax.lax.while_loop(lambda changed: changed[condition], once, before)
    return [after[name] for name in op.writes]


@register_op("conditional_block")
def conditional_block(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Runs its block if `Cond` holds; else `Out` stays what it was."""
    held = dict(zip(op.reads, inputs, strict=True))
    condition = str(op.inputs.slot("Cond")[0])
    block = block_of(ctx.program, op.attrs["sub_block"])

    def run() -> list[Array]:
        after = ctx.run_scope(block, held)
        return [after[name] for name in op.writes]

    return jax.lax.cond(held[condition], run, lambda: [held[name] for name in op.writes])

"""Gradient operators: `jax.vjp` of the operator, or the function in its schema.

A gradient operator reads the slots that the schema names and, as `Out@GRAD`, the gradients of the
outputs; it writes `X@GRAD` for the inputs whose gradients are requested.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operands, Operator
from jaxfleet.ir.naming import GRAD
from jaxfleet.ops.fluid.schema import (
    Gradient,
    Schema,
    Slot,
    Value,
    attributes,
    by_slot,
    describe,
    flat,
    schema_of,
)
from jaxfleet.ops.registry import Array, Context, find_op, register_op


def define_gradient(op_type: str) -> None:
    """Registers a fluid operator's gradient operator, and the gradient operator of that one.

    So second derivatives exist, as a gradient penalty needs; third ones do not.
    """
    schema = schema_of(op_type)
    if schema is None or schema.gradient is None:
        raise ProgramError(f"operator type '{op_type}' has no gradient")
    first = _defined(schema, schema.gradient)
    second = replace(first, gradient=differentiable(first))
    describe(second)
    assert second.gradient is not None
    _defined(second, second.gradient)


def define_block_gradient(op_type: str, attrs: Mapping[str, Any] | None = None) -> None:
    """Registers the gradient operator of one with a sub-block, of which it runs a copy.

    `attrs` are its attributes besides the copy's names of its operands.
    """
    schema = schema_of(op_type)
    if schema is None or schema.gradient is None:
        raise ProgramError(f"operator type '{op_type}' has no gradient")
    made = _defined(schema, schema.gradient)
    describe(replace(made, attrs={**made.attrs, "reads": [], "writes": [], **(attrs or {})}))


def _defined(schema: Schema, gradient: Gradient) -> Schema:
    """Registers one gradient operator, and returns its schema."""

    def meaning(ctx: Context, op: Operator, values: Sequence[Array]) -> Sequence[Array]:
        given = tuple(slot for slot in _all_slots(schema) if slot.name in gradient.reads)
        grads = tuple(_grad_slot(slot) for slot in schema.outputs)
        held = by_slot((*given, *grads), op, values)
        made = _computed(ctx, op, schema, gradient, held)
        return flat(op, {name + GRAD: value for name, value in made.items()})

    register_op(gradient.type)(meaning)
    made = _gradient_schema(schema, gradient)
    describe(made)
    return made


def differentiable(schema: Schema) -> Gradient:
    """The default gradient: reads all inputs, and differentiates all of them."""
    names = tuple(slot.name for slot in schema.inputs)
    return Gradient(f"{schema.type}_grad", names, names)


def _gradient_schema(schema: Schema, gradient: Gradient) -> Schema:
    given = tuple(
        Slot(slot.name, slot.many, optional=True)
        for slot in _all_slots(schema)
        if slot.name in gradient.reads
    )
    read = (*given, *(_grad_slot(slot) for slot in schema.outputs))
    inputs = {slot.name: slot for slot in schema.inputs}
    written = tuple(_grad_slot(inputs[name]) for name in gradient.writes)
    return Schema(gradient.type, read, written, schema.attrs)


def _all_slots(schema: Schema) -> tuple[Slot, ...]:
    return (*schema.inputs, *schema.outputs)


def _grad_slot(slot: Slot) -> Slot:
    return Slot(slot.name + GRAD, slot.many, optional=True)


def _computed(
    ctx: Context, op: Operator, schema: Schema, gradient: Gradient, held: Mapping[str, Value]
) -> Mapping[str, Value]:
    if gradient.compute is None:
        return _by_vjp(ctx, op, schema, held)
    reads = {name: held[name] for name in gradient.reads}
    grads = {slot.name: held[slot.name + GRAD] for slot in schema.outputs}
    return gradient.compute(attributes(ctx, op, schema), reads, grads)


def _by_vjp(
    ctx: Context, op: Operator, schema: Schema, held: Mapping[str, Value]
) -> Mapping[str, Value]:
    """Differentiates the operator with respect to the inputs whose gradients are written."""
    wanted = [slot for slot in schema.inputs if op.outputs.slot(slot.name + GRAD)]
    forward = _forward(op, schema, held)
    meaning = find_op(schema.type).meaning

    def run(chosen: Mapping[str, Value]) -> Sequence[Array]:
        values = {**held, **chosen}
        args = [x for slot in schema.inputs for x in _listed(values[slot.name])]
        return tuple(meaning(ctx, forward, args))

    made, pull = jax.vjp(run, {slot.name: held[slot.name] for slot in wanted})
    given = [g for slot in schema.outputs for g in _cotangents(slot, op, held)]
    (found,) = pull(tuple(_cotangent(x, g) for x, g in zip(made, given, strict=True)))
    return dict(found)


def _forward(op: Operator, schema: Schema, held: Mapping[str, Value]) -> Operator:
    """The operator of a gradient operator, with generated names."""
    inputs = [(slot.name, _names(slot, held[slot.name])) for slot in schema.inputs]
    outputs = [
        (slot.name, tuple(f"{slot.name}.{i}" for i in range(_count(slot, op))))
        for slot in schema.outputs
    ]
    read = Operands((name, names) for name, names in inputs if names)
    return Operator(schema.type, read, Operands(outputs), op.attrs, source=op.source)


def _names(slot: Slot, value: Value) -> tuple[str, ...]:
    return tuple(f"{slot.name}.{i}" for i in range(len(_listed(value))))


def _count(slot: Slot, op: Operator) -> int:
    return max(1, len(op.inputs.slot(slot.name + GRAD))) if slot.many else 1


def _listed(value: Value) -> list[Array]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _cotangents(slot: Slot, op: Operator, held: Mapping[str, Value]) -> list[Array | None]:
    found: list[Array | None] = list(_listed(held[slot.name + GRAD]))
    return found + [None] * (_count(slot, op) - len(found))


def _cotangent(made: Array, given: Array | None) -> Any:
    """The gradient of an output; zero if nothing depends on it."""
    if not jnp.issubdtype(made.dtype, jnp.inexact):
        return np.zeros(made.shape, jax.dtypes.float0)
    if given is None:
        return jnp.zeros_like(made)
    return jnp.asarray(given, made.dtype).reshape(made.shape)

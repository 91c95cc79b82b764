"""Schemas of fluid's operators: slots, attributes with defaults, and their differentiation.

Fluid compares programs by their operators' types and slots, so both are fluid's own here. An
operator is computed by one JAX function, and its gradient operator by `jax.vjp` of it, except where
fluid's gradient operator does not read all inputs (`relu_grad` reads `Out`, not `X`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operands, Operator
from jaxfleet.ir.naming import GRAD
from jaxfleet.ops.collective import attr
from jaxfleet.ops.registry import Array, Context, find_op, register_op

EMPTY = "@EMPTY@"  # placeholder of an unwanted output of a gradient operator
UNWANTED = "unwanted"  # attribute in the IR: (slot, position) of unwanted outputs beside wanted

Attributes: TypeAlias = Mapping[str, Any]  # all attributes of an operator, defaults included
Value: TypeAlias = Any  # of a slot: an array, a list of them, or None if the slot is empty
Compute: TypeAlias = Callable[..., Value]
BySlot: TypeAlias = Mapping[str, Value]
GradCompute: TypeAlias = Callable[..., BySlot]


@dataclass(frozen=True)
class Slot:
    """One named slot of operands."""

    name: str  # fluid's: `X`
    many: bool = False  # it may hold several variables; its value is a list
    optional: bool = False  # it may be empty; its value is then None

    @classmethod
    def parse(cls, text: str) -> "Slot":
        """Parses `X`, `X*` (many), `Bias?` (optional)."""
        name = text.rstrip("*?")
        return cls(name, many="*" in text, optional="?" in text)


@dataclass(frozen=True)
class Gradient:
    """Differentiation of an operator.

    Attributes:
        type: the gradient operator's type.
        reads: the operator's slots, inputs and outputs, that the gradient operator reads, besides
            the gradients of its outputs.
        writes: the differentiable inputs.
        compute: `(attrs, reads, gradients of outputs) -> gradients by input`; None for `jax.vjp` of
            the operator, which needs all of its inputs in `reads`.
        only_if: slots that are read only if an attribute has a value.
        by: for a gradient operator that is also an ordinary one (that of `split` is `concat`), maps
            the operator's attributes to its. It reads the gradient of the output as `X`, and writes
            that of one input as `Out`; several inputs have one each.
        unless: an attribute and its value for which there is no gradient.
    """

    type: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    compute: GradCompute | None = None
    only_if: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    by: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    unless: tuple[str, Any] | None = None

    def reads_with(self, attrs: Mapping[str, Any]) -> list[str]:
        """Slots that the gradient operator of an operator with these attributes reads."""
        unread = {slot for slot, (name, value) in self.only_if.items() if attrs[name] != value}
        return [slot for slot in self.reads if slot not in unread]


@dataclass(frozen=True)
class Schema:
    """One operator type.

    Attributes:
        type: fluid's name of it.
        inputs: in the argument order of `compute`.
        outputs: in the order of its results.
        attrs: every attribute with its default.
        gradient: None if it is not differentiable.
        compute: `(attrs, *inputs) -> output or outputs`; None if registered elsewhere.
    """

    type: str
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    gradient: Gradient | None = None
    compute: Compute | None = None


_SCHEMAS: dict[str, Schema] = {}


def schema_of(op_type: str) -> Schema | None:
    """The schema of an operator type; None for one that is not fluid's."""
    return _SCHEMAS.get(op_type)


def slots(text: str) -> tuple[Slot, ...]:
    """Parses slots: `"X Y Bias?"`."""
    return tuple(Slot.parse(word) for word in text.split())


def declare(schema: Schema) -> Schema:
    """Makes a schema known, and returns it."""
    _SCHEMAS[schema.type] = schema
    return schema


def describe(
    op_type: str,
    *,
    inputs: str = "",
    outputs: str = "Out",
    attrs: Mapping[str, Any] | None = None,
    gradient: Gradient | str | None = None,
    compute: Compute | None = None,
) -> Schema:
    """Declares the schema of an operator.

    Args:
        op_type: fluid's name of it.
        inputs: slots in argument order: `"X Y Bias?"`.
        outputs: slots in the order of the results.
        attrs: every attribute with its default.
        gradient: `"X Y -> X"` for a gradient operator `<op_type>_grad` that reads these slots, and
            differentiates the inputs after the arrow by `jax.vjp`; a `Gradient` for any other; None
            if it is not differentiable.
        compute: the operator's computation; None if it is registered elsewhere.
    """
    if isinstance(gradient, str):
        reads, _, writes = gradient.partition("->")
        gradient = Gradient(f"{op_type}_grad", tuple(reads.split()), tuple(writes.split()))
    made = Schema(op_type, slots(inputs), slots(outputs), attrs or {}, gradient, compute)
    return declare(made)


def fluid_op(op_type: str, **described: Any) -> Callable[[Compute], Compute]:
    """Registers the decorated function as the computation of a fluid operator, with its gradient.

    `described` are the options of `describe`; the function's first argument is a mapping of all
    attributes, the others are the values of its slots.
    """

    def register(compute: Compute) -> Compute:
        schema = describe(op_type, compute=compute, **described)

        def meaning(ctx: Context, op: Operator, values: Sequence[Array]) -> Sequence[Array]:
            held = by_slot(schema.inputs, op, values)
            made = compute(attributes(ctx, op, schema), *(held[s.name] for s in schema.inputs))
            made = made if len(schema.outputs) > 1 else (made,)
            return flat(op, dict(zip((s.name for s in schema.outputs), made, strict=True)))

        register_op(op_type)(meaning)
        if schema.gradient is not None and schema.gradient.by is None:
            define_gradient(op_type)
        return compute

    return register


def attributes(ctx: Context, op: Operator, schema: Schema) -> Mapping[str, Any]:
    """An operator's attributes, with numbers for letters, and the defaults."""
    return {**schema.attrs, **{name: attr(ctx, op, name) for name in op.attrs}}


def by_slot(wanted: Sequence[Slot], op: Operator, values: Sequence[Array]) -> dict[str, Value]:
    """An operator's inputs by slot."""
    rest = iter(values)
    held = {name: [next(rest) for _ in operands] for name, operands in op.inputs.slots}
    return {slot.name: value_of(slot, held.get(slot.name, [])) for slot in wanted}


def value_of(slot: Slot, found: list[Array]) -> Value:
    """The value of a slot's arrays, as passed to a computation."""
    if slot.many:
        return found
    return found[0] if found else None


def flat(op: Operator, made: BySlot) -> list[Array]:
    """Outputs in the order of an operator's operands, without unwanted ones."""
    found: list[Array] = []
    unwanted: Any = op.attrs.get(UNWANTED, ())
    for name, operands in op.outputs.slots:
        value = made.get(name)
        values = value if isinstance(value, list) else [value]
        if unwanted:
            values = [x for at, x in enumerate(values) if (name, at) not in unwanted]
        if len(values) < len(operands) or any(x is None for x in values[: len(operands)]):
            raise ProgramError(f"{op.type} does not make '{name}'", op=op)
        found += values[: len(operands)]
    return found


def define_gradient(op_type: str) -> None:
    """Registers a fluid operator's gradient operator, and the gradient operator of that one.

    So second derivatives exist, as a gradient penalty needs; third ones do not.
    """
    first = _define(_SCHEMAS[op_type])
    names = tuple(slot.name for slot in first.inputs)
    _define(declare(replace(first, gradient=Gradient(f"{first.type}_grad", names, names))))


def define_block_gradient(op_type: str, attrs: Mapping[str, Any] | None = None) -> None:
    """Registers the gradient operator of one with a sub-block, of which it runs a copy.

    `attrs` are its attributes besides the copy's names of its operands.
    """
    made = _define(_SCHEMAS[op_type])
    declare(replace(made, attrs={**made.attrs, "reads": [], "writes": [], **(attrs or {})}))


def _define(schema: Schema) -> Schema:
    """Registers one gradient operator, and returns its schema.

    It reads the slots that the gradient names and, as `Out@GRAD`, the gradients of the outputs; it
    writes `X@GRAD` for the inputs whose gradients are requested.
    """
    assert schema.gradient is not None
    gradient = schema.gradient

    def meaning(ctx: Context, op: Operator, values: Sequence[Array]) -> Sequence[Array]:
        given = _slots_read(schema, gradient)
        grads = tuple(_grad_slot(slot) for slot in schema.outputs)
        held = by_slot((*given, *grads), op, values)
        made = _computed(ctx, op, schema, gradient, held)
        return flat(op, {name + GRAD: value for name, value in made.items()})

    register_op(gradient.type)(meaning)
    given = (Slot(slot.name, slot.many, optional=True) for slot in _slots_read(schema, gradient))
    read = (*given, *(_grad_slot(slot) for slot in schema.outputs))
    inputs = {slot.name: slot for slot in schema.inputs}
    written = tuple(_grad_slot(inputs[name]) for name in gradient.writes)
    return declare(Schema(gradient.type, read, written, schema.attrs))


def _slots_read(schema: Schema, gradient: Gradient) -> tuple[Slot, ...]:
    every = (*schema.inputs, *schema.outputs)
    return tuple(slot for slot in every if slot.name in gradient.reads)


def _grad_slot(slot: Slot) -> Slot:
    return Slot(slot.name + GRAD, slot.many, optional=True)


def _computed(
    ctx: Context, op: Operator, schema: Schema, gradient: Gradient, held: BySlot
) -> BySlot:
    if gradient.compute is None:
        return _by_vjp(ctx, op, schema, held)
    reads = {name: held[name] for name in gradient.reads}
    grads = {slot.name: held[slot.name + GRAD] for slot in schema.outputs}
    return gradient.compute(attributes(ctx, op, schema), reads, grads)


def _by_vjp(ctx: Context, op: Operator, schema: Schema, held: BySlot) -> BySlot:
    """Differentiates the operator with respect to the inputs whose gradients are written."""
    wanted = [slot for slot in schema.inputs if op.outputs.slot(slot.name + GRAD)]
    forward = _forward(op, schema, held)
    meaning = find_op(schema.type).meaning

    def run(chosen: BySlot) -> Sequence[Array]:
        values = {**held, **chosen}
        args = [x for slot in schema.inputs for x in _listed(values[slot.name])]
        return tuple(meaning(ctx, forward, args))

    made, pull = jax.vjp(run, {slot.name: held[slot.name] for slot in wanted})
    given = [g for slot in schema.outputs for g in _cotangents(slot, op, held)]
    (found,) = pull(tuple(_cotangent(x, g) for x, g in zip(made, given, strict=True)))
    return dict(found)


def _forward(op: Operator, schema: Schema, held: BySlot) -> Operator:
    """The operator of a gradient operator, with generated names."""
    counts = [(slot.name, len(_listed(held[slot.name]))) for slot in schema.inputs]
    read = Operands((name, _names(name, count)) for name, count in counts if count)
    made = Operands((slot.name, _names(slot.name, _count(slot, op))) for slot in schema.outputs)
    return Operator(schema.type, read, made, op.attrs, source=op.source)


def _names(slot: str, count: int) -> tuple[str, ...]:
    return tuple(f"{slot}.{at}" for at in range(count))


def _count(slot: Slot, op: Operator) -> int:
    return max(1, len(op.inputs.slot(slot.name + GRAD))) if slot.many else 1


def _listed(value: Value) -> list[Array]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _cotangents(slot: Slot, op: Operator, held: BySlot) -> list[Array | None]:
    found: list[Array | None] = list(_listed(held[slot.name + GRAD]))
    return found + [None] * (_count(slot, op) - len(found))


def _cotangent(made: Array, given: Array | None) -> Any:
    """The gradient of an output; zero if nothing depends on it."""
    if not jnp.issubdtype(made.dtype, jnp.inexact):
        return np.zeros(made.shape, jax.dtypes.float0)
    if given is None:
        return jnp.zeros_like(made)
    return jnp.asarray(given, made.dtype).reshape(made.shape)

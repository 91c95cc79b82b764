"""Schemas of fluid's operators: slots, attributes with defaults, and their differentiation.

Fluid compares programs by their operators' types and slots, so both are fluid's own here. An
operator is computed by one JAX function, and its gradient operator by `jax.vjp` of it, except where
fluid's gradient operator does not read all inputs (`relu_grad` reads `Out`, not `X`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator
from jaxfleet.ops.collective import attr
from jaxfleet.ops.registry import Array, Context, register_op

EMPTY = "@EMPTY@"  # placeholder of an unwanted output of a gradient operator
UNWANTED = "unwanted"  # attribute in the IR: (slot, position) of unwanted outputs beside wanted

Attributes: TypeAlias = Mapping[str, Any]  # all attributes of an operator, defaults included
Value: TypeAlias = Any  # of a slot: an array, a list of them, or None if the slot is empty
Compute: TypeAlias = Callable[..., Value]
GradCompute: TypeAlias = Callable[..., Mapping[str, Value]]


@dataclass(frozen=True)
class Slot:
    """One named slot of operands.

    Attributes:
        name: fluid's: `X`.
        many: it may hold several variables; its value is a list.
        optional: it may be empty; its value is then None.
    """

    name: str
    many: bool = False
    optional: bool = False

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


def describe(schema: Schema) -> None:
    """Declares the schema of an operator type that is computed elsewhere."""
    _SCHEMAS[schema.type] = schema


def fluid_op(
    op_type: str,
    *,
    inputs: str = "",
    outputs: str = "Out",
    attrs: Mapping[str, Any] | None = None,
    gradient: Gradient | None = None,
) -> Callable[[Compute], Compute]:
    """Registers the decorated function as the computation of a fluid operator.

    Args:
        op_type: fluid's name of it.
        inputs: slots in argument order: `"X Y Bias?"`.
        outputs: slots in the order of the results.
        attrs: defaults; the function's first argument is a mapping of all attributes.
        gradient: None if it is not differentiable.
    """

    def register(compute: Compute) -> Compute:
        schema = Schema(op_type, slots(inputs), slots(outputs), attrs or {}, gradient, compute)
        describe(schema)

        def meaning(ctx: Context, op: Operator, values: Sequence[Array]) -> Sequence[Array]:
            held = by_slot(schema.inputs, op, values)
            made = compute(attributes(ctx, op, schema), *(held[s.name] for s in schema.inputs))
            made = made if len(schema.outputs) > 1 else (made,)
            return flat(op, dict(zip((s.name for s in schema.outputs), made, strict=True)))

        register_op(op_type)(meaning)
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


def flat(op: Operator, made: Mapping[str, Value]) -> list[Array]:
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

"""What fluid's operators look like: slots, attributes with defaults, how each is differentiated.

Fluid compares programs by their operators' types and slots, so both are fluid's own here. What an
operator computes is one JAX function; what its gradient operator computes is `jax.vjp` of it, but
where fluid's gradient operator does not read what that needs (`relu_grad` reads `Out`, not `X`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator
from jaxfleet.ops.collective import attr
from jaxfleet.ops.registry import Array, Context, register_op

EMPTY = "@EMPTY@"  # stands where a gradient operator's output is not wanted
UNWANTED = "unwanted"  # attribute in the IR: (slot, place) of each that stood beside wanted ones

Attributes: TypeAlias = Mapping[str, Any]  # all of an operator's, defaults too
Value: TypeAlias = Any  # of a slot: an array, a list of them, or None where the slot is empty
Compute: TypeAlias = Callable[..., Value]
GradCompute: TypeAlias = Callable[..., Mapping[str, Value]]


@dataclass(frozen=True)
class Slot:
    """One named place for operands.

    Attributes:
        name: fluid's: `X`.
        many: it may hold several variables, and its value is a list.
        optional: it may be empty, and its value is then None.
    """

    name: str
    many: bool = False
    optional: bool = False

    @classmethod
    def parse(cls, text: str) -> "Slot":
        """Reads `X`, `X*` (many), `Bias?` (optional)."""
        name = text.rstrip("*?")
        return cls(name, many="*" in text, optional="?" in text)


@dataclass(frozen=True)
class Gradient:
    """How an operator is differentiated.

    Attributes:
        type: the gradient operator's type.
        reads: the operator's slots, inputs and outputs, that the gradient operator reads, besides
            the gradients of its outputs.
        writes: the inputs that have gradients.
        compute: computes them, `(attrs, reads, gradients of outputs) -> gradients by input`; None
            for `jax.vjp` of the operator, which needs all of its inputs in `reads`.
        only_if: slots that are read only where an attribute has a value.
        by: where the gradient operator is one that is there for other reasons (that of `split` is
            `concat`), its attributes from those of the operator. It reads the gradients of the
            output as `X`, and writes that of one input as `Out`; several inputs have one each.
        unless: an attribute and the value of it with which there is no gradient.
    """

    type: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    compute: GradCompute | None = None
    only_if: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    by: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    unless: tuple[str, Any] | None = None

    def reads_with(self, attrs: Mapping[str, Any]) -> list[str]:
        """Returns what the gradient operator reads of an operator with these attributes."""
        unread = {slot for slot, (name, value) in self.only_if.items() if attrs[name] != value}
        return [slot for slot in self.reads if slot not in unread]


@dataclass(frozen=True)
class Schema:
    """One operator type.

    Attributes:
        type: fluid's name of it.
        inputs: in the order that `compute` takes them.
        outputs: in the order that it returns them.
        attrs: every attribute with its default.
        gradient: how it is differentiated; None where it is not.
        compute: `(attrs, *inputs) -> output or outputs`; None for one whose meaning was there.
    """

    type: str
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    gradient: Gradient | None = None
    compute: Compute | None = None


_SCHEMAS: dict[str, Schema] = {}


def schema_of(op_type: str) -> Schema | None:
    """Returns what an operator type looks like; None for one that is not fluid's."""
    return _SCHEMAS.get(op_type)


def slots(text: str) -> tuple[Slot, ...]:
    """Reads slots: `"X Y Bias?"`."""
    return tuple(Slot.parse(word) for word in text.split())


def describe(schema: Schema) -> None:
    """Says what an operator type looks like whose meaning is registered elsewhere."""
    _SCHEMAS[schema.type] = schema


def fluid_op(
    op_type: str,
    *,
    inputs: str = "",
    outputs: str = "Out",
    attrs: Mapping[str, Any] | None = None,
    gradient: Gradient | None = None,
) -> Callable[[Compute], Compute]:
    """Registers the decorated function as what one of fluid's operators computes.

    Args:
        op_type: fluid's name of it.
        inputs: slots in the order of the function's arguments: `"X Y Bias?"`.
        outputs: slots in the order of what it returns.
        attrs: defaults; the function gets all attributes as its first argument, a mapping.
        gradient: how it is differentiated, if it is.
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
    """Returns an operator's attributes, with a number for every letter, and the defaults."""
    return {**schema.attrs, **{name: attr(ctx, op, name) for name in op.attrs}}


def by_slot(wanted: Sequence[Slot], op: Operator, values: Sequence[Array]) -> dict[str, Value]:
    """Returns an operator's inputs by slot."""
    rest = iter(values)
    held = {name: [next(rest) for _ in operands] for name, operands in op.inputs.slots}
    return {slot.name: value_of(slot, held.get(slot.name, [])) for slot in wanted}


def value_of(slot: Slot, found: list[Array]) -> Value:
    """Returns what a slot's arrays are to who computes with them."""
    if slot.many:
        return found
    return found[0] if found else None


def flat(op: Operator, made: Mapping[str, Value]) -> list[Array]:
    """Returns outputs in the order of an operator's operands.

    What it has no slot for is dropped, and so is what is not wanted of a slot.

    Raises:
        ProgramError: an output was not made.
    """
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

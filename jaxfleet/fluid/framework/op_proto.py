"""Prototypes of operator types, as scripts read them from `OpProtoHolder.instance()`."""

from dataclasses import dataclass
from functools import cache

from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.operator import DEVICE, NAME_SCOPE, ROLE, ROLE_VAR
from jaxfleet.ops.fluid import Slot, schema_of


@dataclass(frozen=True)
class SlotProto:
    """A slot of an operator type.

    Attributes:
        name: the slot, such as `X`.
        duplicable: it holds several variables.
        dispensable: it may be empty.
    """

    name: str
    duplicable: bool
    dispensable: bool


@dataclass(frozen=True)
class AttrProto:
    """An attribute of an operator type."""

    name: str


@dataclass(frozen=True)
class OpProto:
    """The signature of an operator type.

    Attributes:
        type: its name.
        inputs: its input slots.
        outputs: its output slots.
        attrs: its attributes, except those common to all operators.
    """

    type: str
    inputs: tuple[SlotProto, ...]
    outputs: tuple[SlotProto, ...]
    attrs: tuple[AttrProto, ...]


class OpProtoHolder:
    """Registry of all operator types; scripts use the singleton `instance()`."""

    @classmethod
    @cache
    def instance(cls) -> "OpProtoHolder":
        """Returns the singleton."""
        return cls()

    def get_op_proto(self, type: str) -> OpProto:
        """Returns the prototype of a type.

        Raises:
            ValueError: there is no such type.
        """
        schema = schema_of(type)
        if schema is None:
            what = f'operator "{type}" has not been registered'
            raise mistake(what, "docs/fluid-differences.md lists what is missing")
        attrs = tuple(AttrProto(name) for name in schema.attrs)
        return OpProto(type, _slots(schema.inputs), _slots(schema.outputs), attrs)

    @staticmethod
    def generated_op_attr_names() -> set[str]:
        """Returns the attributes common to all operators."""
        return {ROLE, ROLE_VAR, NAME_SCOPE, DEVICE, "op_callstack"}


def _slots(slots: tuple[Slot, ...]) -> tuple[SlotProto, ...]:
    return tuple(SlotProto(slot.name, slot.many, slot.optional) for slot in slots)

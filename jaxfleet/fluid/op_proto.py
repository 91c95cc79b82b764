"""What operator types look like, as scripts ask fluid's framework: `OpProtoHolder.instance()`."""

from dataclasses import dataclass
from functools import cache

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.operator import DEVICE, NAME_SCOPE, ROLE, ROLE_VAR
from jaxfleet.ops.fluid import Slot, schema_of


@dataclass(frozen=True)
class SlotProto:
    """A slot of an operator type.

    Attributes:
        name: its name: `X`.
        duplicable: it holds several variables.
        dispensable: it may be empty.
    """

    name: str
    duplicable: bool
    dispensable: bool


@dataclass(frozen=True)
class AttrProto:
    """An attribute of an operator type.

    Attributes:
        name: its name.
    """

    name: str


@dataclass(frozen=True)
class OpProto:
    """What an operator type looks like.

    Attributes:
        type: its name.
        inputs: its input slots.
        outputs: its output slots.
        attrs: its attributes, those that every operator has not among them.
    """

    type: str
    inputs: tuple[SlotProto, ...]
    outputs: tuple[SlotProto, ...]
    attrs: tuple[AttrProto, ...]


class OpProtoHolder:
    """Knows every operator type; scripts take the one `instance()`."""

    @classmethod
    @cache
    def instance(cls) -> "OpProtoHolder":
        """Returns the one that there is."""
        return cls()

    def get_op_proto(self, type: str) -> OpProto:
        """Returns what a type looks like.

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
        """Returns the attributes that every operator has."""
        return {ROLE, ROLE_VAR, NAME_SCOPE, DEVICE, "op_callstack"}


def _slots(slots: tuple[Slot, ...]) -> tuple[SlotProto, ...]:
    return tuple(SlotProto(slot.name, slot.many, slot.optional) for slot in slots)

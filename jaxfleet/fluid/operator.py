"""Operator: one operation of a fluid program, with fluid's accessors."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Source
from jaxfleet.ops.fluid import Schema, Slot, schema_of

if TYPE_CHECKING:
    from jaxfleet.fluid.block import Block

ROLE, ROLE_VAR = "op_role", "op_role_var"
_EVERY = (ROLE, ROLE_VAR, "op_namescope", "op_device")


class Operator:
    """An operation: slots of variable names in and out, and attributes.

    Attributes:
        block: where it stands.
        type: what it does.
        inputs: names by slot.
        outputs: names by slot.
        attrs: attributes, its role (`op_role`) among them.
        source: the user's line.

    Raises:
        ProgramError: the type has no such slot or attribute, or a slot is missing or holds too
            many.
    """

    def __init__(
        self,
        block: "Block",
        type: str,
        inputs: Mapping[str, list[str]],
        outputs: Mapping[str, list[str]],
        attrs: Mapping[str, Any],
        source: Source,
    ) -> None:
        self.block, self.type, self.source = block, type, source
        self.inputs = {slot: list(names) for slot, names in inputs.items() if names}
        self.outputs = {slot: list(names) for slot, names in outputs.items() if names}
        self.attrs = dict(attrs)
        schema = schema_of(type)
        if schema is not None:
            self.attrs = {**schema.attrs, **self.attrs}
            self._check(schema)

    def input(self, name: str) -> list[str]:
        """Returns the names in an input slot."""
        return list(self.inputs.get(name, ()))

    def output(self, name: str) -> list[str]:
        """Returns the names in an output slot."""
        return list(self.outputs.get(name, ()))

    @property
    def input_names(self) -> list[str]:
        """The input slots."""
        return sorted(self.inputs)

    @property
    def output_names(self) -> list[str]:
        """The output slots."""
        return sorted(self.outputs)

    @property
    def input_arg_names(self) -> list[str]:
        """The variables that it reads, by the names of their slots."""
        return [name for slot in self.input_names for name in self.inputs[slot]]

    @property
    def output_arg_names(self) -> list[str]:
        """The variables that it writes, by the names of their slots."""
        return [name for slot in self.output_names for name in self.outputs[slot]]

    def attr(self, name: str) -> Any:
        """Returns an attribute; None where there is none."""
        return self.attrs.get(name)

    def has_attr(self, name: str) -> bool:
        """Tells whether there is an attribute."""
        return name in self.attrs

    def all_attrs(self) -> dict[str, Any]:
        """Returns all attributes."""
        return dict(self.attrs)

    def _set_attr(self, name: str, value: Any) -> None:
        self.attrs[name] = value
        self.block.program.version += 1

    def _rename_input(self, old: str, new: str) -> None:
        self.inputs = _renamed(self.inputs, old, new)
        self.block.program.version += 1

    def _rename_output(self, old: str, new: str) -> None:
        self.outputs = _renamed(self.outputs, old, new)
        self.block.program.version += 1

    def _check(self, schema: Schema) -> None:
        self._check_slots(schema.inputs, self.inputs)
        self._check_slots(schema.outputs, self.outputs)
        for slot in schema.inputs:
            if slot.name not in self.inputs and not slot.optional:
                raise self._wrong(f"lacks its input '{slot.name}'")
        unknown = [name for name in self.attrs if name not in schema.attrs and name not in _EVERY]
        if unknown:
            known = ", ".join(sorted(schema.attrs)) or "none"
            raise self._wrong(f"has no attribute '{unknown[0]}'", f"its attributes are {known}")

    def _check_slots(self, slots: Sequence[Slot], given: Mapping[str, list[str]]) -> None:
        known = {slot.name: slot for slot in slots}
        for name, names in given.items():
            if name not in known:
                raise self._wrong(f"has no slot '{name}'", f"it has {', '.join(known)}")
            if len(names) > 1 and not known[name].many:
                raise self._wrong(f"takes one variable as '{name}', not {len(names)}")

    def _wrong(self, what: str, hint: str | None = None) -> ProgramError:
        return ProgramError(f"operator '{self.type}' {what}", source=self.source, hint=hint)

    def __str__(self) -> str:
        read = ", ".join(f"{slot}={self.inputs[slot]}" for slot in self.input_names)
        written = ", ".join(f"{slot}={self.outputs[slot]}" for slot in self.output_names)
        return f"{{{written}}} = {self.type}({read})"

    __repr__ = __str__


def _renamed(slots: Mapping[str, list[str]], old: str, new: str) -> dict[str, list[str]]:
    return {slot: [new if name == old else name for name in names] for slot, names in slots.items()}

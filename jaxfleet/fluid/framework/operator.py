"""Operator: one operation of a fluid program, with its role; prototypes of operator types."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxfleet.errors import AssertedError, ProgramError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.types import OperatorDesc
from jaxfleet.ir import Role, Source
from jaxfleet.ir.naming import INSTEAD_OF
from jaxfleet.ops.fluid import Schema, Slot, schema_of
from jaxfleet.ops.fluid.arrays import DRAWS_AS

if TYPE_CHECKING:
    from jaxfleet.fluid.framework.block import Block


class OpRole:
    """The part of a training step to which an operator belongs, as fluid numbers it."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZE = 2
    RPC = 4
    DIST = 8
    LR_SCHED = 16
    LOSS = 256
    NOT_SPECIFIED = 4096


_ROLES: Mapping[int, Role] = {
    OpRole.FORWARD: Role.FORWARD,
    OpRole.FORWARD | OpRole.LOSS: Role.FORWARD_LOSS,
    OpRole.BACKWARD: Role.BACKWARD,
    OpRole.BACKWARD | OpRole.LOSS: Role.BACKWARD_LOSS,
    OpRole.OPTIMIZE: Role.OPTIMIZE,
    OpRole.OPTIMIZE | OpRole.LR_SCHED: Role.OPTIMIZE_LR_SCHED,
    OpRole.LR_SCHED: Role.LR_SCHED,
    OpRole.RPC: Role.RPC,
    OpRole.DIST: Role.DIST,
    OpRole.NOT_SPECIFIED: Role.FORWARD,
}


def ir_role(number: int) -> Role:
    """Converts one of fluid's role numbers to the IR's; ProgramError if there is none."""
    if number not in _ROLES:
        known = ", ".join(map(str, sorted(_ROLES)))
        raise ProgramError(f"{number} is no role of an operator", hint=f"roles are {known}")
    return _ROLES[number]


def number_of(role: Role) -> int:
    """Converts an IR role to fluid's number."""
    return next(number for number, known in _ROLES.items() if known is role)


ROLE, ROLE_VAR = "op_role", "op_role_var"
NAME_SCOPE, DEVICE = "op_namescope", "op_device"
_CALL_STACK = "op_callstack"
_TRIPS = "max_trips"  # of a `while` in a block that is differentiated
_EVERY = (ROLE, ROLE_VAR, NAME_SCOPE, DEVICE, _CALL_STACK, INSTEAD_OF, _TRIPS, DRAWS_AS)


class Operator:
    """An operation: slots of variable names in and out, and attributes.

    Attributes:
        block: the block that contains it.
        type: the operator type.
        inputs: names by slot.
        outputs: names by slot.
        attrs: attributes, including its role (`op_role`).
        source: the user's line.

    Raises:
        ProgramError: the type has no such slot or attribute, or a slot holds too many variables.
        AssertedError: a slot is missing.
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
        self.attrs = {name: _plain(value) for name, value in attrs.items()}
        ir_role(self.attrs.get(ROLE, 0))  # raises
        schema = schema_of(type)
        if schema is not None:
            self.attrs = {**schema.attrs, **self.attrs}
            self._check(schema)

    @property
    def desc(self) -> OperatorDesc:
        """A view with fluid's description methods: `op.desc.type()`."""
        return OperatorDesc(self)

    # --- inputs and outputs ------------------------------------------------------------------

    def input(self, name: str) -> list[str]:
        return list(self.inputs.get(name, ()))

    def output(self, name: str) -> list[str]:
        return list(self.outputs.get(name, ()))

    @property
    def input_names(self) -> list[str]:
        return sorted(self.inputs)

    @property
    def output_names(self) -> list[str]:
        return sorted(self.outputs)

    @property
    def input_arg_names(self) -> list[str]:
        """The variables that it reads, sorted by slot name."""
        return [name for slot in self.input_names for name in self.inputs[slot]]

    @property
    def output_arg_names(self) -> list[str]:
        """The variables that it writes, sorted by slot name."""
        return [name for slot in self.output_names for name in self.outputs[slot]]

    def _rename_input(self, old: str, new: str) -> None:
        self.inputs = _renamed(self.inputs, old, new)
        self.block.program.version += 1

    def _rename_output(self, old: str, new: str) -> None:
        self.outputs = _renamed(self.outputs, old, new)
        self.block.program.version += 1

    # --- attributes --------------------------------------------------------------------------

    def attr(self, name: str) -> Any:
        """Returns an attribute; None if it is not set."""
        return self._call_stack() if name == _CALL_STACK else self.attrs.get(name)

    def has_attr(self, name: str) -> bool:
        return name in self.attrs or name == _CALL_STACK

    @property
    def attr_names(self) -> list[str]:
        return sorted({*self.attrs, _CALL_STACK})

    def all_attrs(self) -> dict[str, Any]:
        """Returns all attributes, with the program's own Block objects."""
        return {**self.attrs, _CALL_STACK: self._call_stack()}

    def _set_attr(self, name: str, val: Any) -> None:
        self.attrs[name] = _plain(val)
        self.block.program.version += 1

    def _remove_attr(self, name: str) -> None:
        self.attrs.pop(name, None)
        self.block.program.version += 1

    def _block_attr(self, name: str) -> "Block":
        return self.block.program.block(self._block_attr_id(name))

    def _block_attr_id(self, name: str) -> int:
        if not _is_block(self.attrs.get(name)):
            raise self._wrong(f"has no block as '{name}'")
        number: int = self.attrs[name].idx
        return number

    def _inner_blocks(self) -> list["Block"]:
        """Returns the blocks that attributes refer to, singly or in lists."""
        many = (v if isinstance(v, list) else [v] for v in self.attrs.values())
        return [block for blocks in many for block in blocks if _is_block(block)]

    def _call_stack(self) -> list[str]:
        where = self.source.where()
        return where.splitlines() if where else []

    # --- kind and position -------------------------------------------------------------------

    @property
    def idx(self) -> int:
        """Its position in its block; ProgramError if it was removed from the block."""
        for at, op in enumerate(self.block.ops):
            if op is self:
                return at
        raise self._wrong("is no longer in its block")

    def _is_optimize_op(self) -> bool:
        return bool(self.attrs.get(ROLE, 0) & OpRole.OPTIMIZE)

    def _is_backward_op(self) -> bool:
        return bool(self.attrs.get(ROLE, 0) & OpRole.BACKWARD)

    def to_string(self, throw_on_error: bool = False, with_details: bool = False) -> str:
        """Returns one line of text, with all attributes or only the non-default ones.

        Raises:
            TypeError: an argument is not a bool.
        """
        check_type(throw_on_error, "throw_on_error", bool)
        check_type(with_details, "with_details", bool)
        shown = {name: _numbered(value) for name, value in self.attrs.items()}
        return f"{self._line()} {shown}" if with_details else str(self)

    def _copied(self, block: "Block") -> "Operator":
        """Returns a copy in another block without checking it again."""
        made = copy.copy(self)
        made.block = block
        made.inputs = {slot: names.copy() for slot, names in self.inputs.items()}
        made.outputs = {slot: names.copy() for slot, names in self.outputs.items()}
        made.attrs = {k: v.copy() if type(v) is list else v for k, v in self.attrs.items()}
        return made

    # --- validation --------------------------------------------------------------------------

    def _check(self, schema: Schema) -> None:
        self._check_slots(schema.inputs, self.inputs)
        self._check_slots(schema.outputs, self.outputs)
        for slot in schema.inputs:
            if slot.name not in self.inputs and not slot.optional:
                raise self._wrong(f"lacks its input '{slot.name}'", kind=AssertedError)
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

    def _wrong(
        self, what: str, hint: str | None = None, kind: type[ProgramError] = ProgramError
    ) -> ProgramError:
        return kind(f"operator '{self.type}' {what}", source=self.source, hint=hint)

    def __str__(self) -> str:
        schema = schema_of(self.type)
        usual = schema.attrs if schema else {}
        said = {name: v for name, v in sorted(self.attrs.items()) if name not in _EVERY}
        own = [f"{n}={_numbered(v)!r}" for n, v in said.items() if n not in usual or v != usual[n]]
        return f"{self._line()} {{{', '.join(own)}}}" if own else self._line()

    def _line(self) -> str:
        read = ", ".join(f"{slot}={self.inputs[slot]}" for slot in self.input_names)
        written = ", ".join(f"{slot}={self.outputs[slot]}" for slot in self.output_names)
        return f"{{{written}}} = {self.type}({read})"

    __repr__ = __str__


def _renamed(slots: Mapping[str, list[str]], old: str, new: str) -> dict[str, list[str]]:
    return {slot: [new if name == old else name for name in names] for slot, names in slots.items()}


def _is_block(value: Any) -> bool:
    return hasattr(value, "idx") and hasattr(value, "ops")


def _numbered(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbered(one) for one in value]
    return value.idx if _is_block(value) else value


def _plain(value: Any) -> Any:
    """Returns an attribute without numpy types; a list is copied."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [x.item() if isinstance(x, np.generic) else x for x in value]
    return value


@dataclass(frozen=True)
class SlotProto:
    """A slot of an operator type."""

    name: str  # the slot, such as `X`
    duplicable: bool  # it holds several variables
    dispensable: bool  # it may be empty


@dataclass(frozen=True)
class AttrProto:
    """An attribute of an operator type."""

    name: str


@dataclass(frozen=True)
class OpProto:
    """The signature of an operator type."""

    type: str  # its name
    inputs: tuple[SlotProto, ...]  # its input slots
    outputs: tuple[SlotProto, ...]  # its output slots
    attrs: tuple[AttrProto, ...]  # its attributes, except those common to all operators


class OpProtoHolder:
    """Registry of all operator types; scripts use the singleton `instance()`."""

    @classmethod
    @cache
    def instance(cls) -> "OpProtoHolder":
        return cls()

    def get_op_proto(self, type: str) -> OpProto:
        """Returns the prototype of a type; ValueError if there is no such type."""
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

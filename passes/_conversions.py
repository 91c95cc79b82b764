"""Puts the operators into a block that make a value lie otherwise on the devices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from jaxfleet.analysis.labels import REPLICATED, SUM, VARYING, Label, Mesh
from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    Kind,
    Literal,
    Operand,
    Operands,
    Operator,
    Program,
    Variable,
)
from jaxfleet.ir.names import unique
from jaxfleet.passes._remaking import Remaking

Pairs: TypeAlias = tuple[tuple[str, str], ...]
ON_THE_RING: Mapping[str, Attr] = {"ring_id": 0}  # fluid's spelling of: among all devices


@dataclass(frozen=True)
class Value:
    """A value that an operator reads.

    Attributes:
        operand: its name in the one-device program, or a literal.
        held: what holds it now.
        label: how that lies.
        is_zero: it is zero whatever the data.
    """

    operand: Operand
    held: Operand
    label: Label
    is_zero: bool = False


@dataclass
class Conversions:
    """Rewrites one block's operands.

    Attributes:
        taken: the names that are in use anywhere in the program.
        variables: those of the rewritten block.
        add: takes the operators, in order.
    """

    program: Program
    block: Block
    mesh: Mesh
    taken: set[str]
    add: Callable[[Operator], None]
    variables: dict[str, Variable] = field(default_factory=dict)
    _known: dict[str, dict[Label, str]] = field(default_factory=dict)
    remaking: Remaking = field(init=False)

    def __post_init__(self) -> None:
        self.remaking = Remaking(self.program, self.block, self.mesh)

    def declare(self, variable: Variable, label: Label) -> None:
        """Declares a variable of the one-device program with the shape that a device has."""
        shape = self.mesh.local_shape(variable.shape, label)
        known = variable if shape == variable.shape else replace(variable, shape=shape)
        self.variables[variable.name] = known

    def new_temporary(self, like: Variable, label: Label, suffix: str) -> str:
        """Declares a variable for another variable's value under another label."""
        name = unique(f"{like.name}.{suffix}", self.taken)
        self.taken.add(name)
        self.declare(replace(like, name=name, kind=Kind.TEMP, constant=None), label)
        return name

    def forget(self, name: str) -> None:
        """Forgets what holds a variable's old value."""
        self._known.pop(name, None)
        self.remaking.forget(name)

    def get(self, value: Value, wanted: Label, near: Operator) -> Operand:
        """Returns what holds a value under the label that is wanted.

        Args:
            value: the value.
            wanted: how it must lie.
            near: the operator that reads it, for its role and its source line.
        """
        if value.label == wanted or (value.label, wanted) == (REPLICATED, VARYING):
            return value.held
        if value.is_zero and wanted == SUM and not value.label.is_sharded:
            return value.held
        if isinstance(value.operand, Literal):
            return self._convert(value, wanted, near)
        known = self._known.setdefault(value.operand, {})
        if wanted not in known:
            known[wanted] = self._convert(value, wanted, near)
        return known[wanted]

    def insert(
        self,
        op_type: str,
        operand: Operand,
        output: str,
        near: Operator,
        attrs: Mapping[str, Attr],
        *,
        pairs: Pairs = (),
    ) -> None:
        """Puts in an operator with one input and one output, for an operator of the program."""
        ins, outs = Operands.of(operand), Operands.of(output)
        self.add(Operator(op_type, ins, outs, Attrs(attrs), near.role, pairs, near.source))

    def _convert(self, value: Value, wanted: Label, near: Operator) -> str:
        if (op := self.remaking.find(value.operand, wanted)) is not None:
            new = self._output(value, wanted)
            self.add(replace(op, outputs=Operands.of(new), role=near.role))
            return new
        if wanted == SUM:
            return self._summand(value, near)
        op_type, attrs = self.conversion(value, wanted)
        held = value.held
        if op_type == "c_split" and value.label.is_sharded:
            held = self.get(value, REPLICATED, near)
        new = self._output(value, wanted)
        self.insert(op_type, held, new, near, attrs)
        return new

    def conversion(self, value: Value, wanted: Label) -> tuple[str, Mapping[str, Attr]]:
        """Returns the operator that moves a value between devices, and its attributes."""
        label, devices = value.label, self.mesh.devices
        if wanted == SUM:
            return "c_summand", {}
        if wanted.is_sharded:
            rows: dict[str, Attr] = {"axis": wanted.axis, "devices": devices}
            if label.is_sum:
                return "c_reducescatter", rows
            if label.is_sharded and REPLICATED not in self._known.get(str(value.operand), {}):
                return "c_alltoall", {"from_axis": label.axis, **rows}
            return "c_split", rows
        if label.is_sharded:
            return "c_allgather", {"axis": label.axis, "devices": devices}
        assert (label, wanted) == (VARYING, REPLICATED), f"no conversion from {label} to {wanted}"
        return "c_allreduce_avg", ON_THE_RING

    def _summand(self, value: Value, near: Operator) -> str:
        """Makes a summand of what is complete: the first device has it, the others have zero."""
        whole = self.get(value, REPLICATED, near)
        if value.is_zero:
            return str(whole)
        new = self._output(value, SUM)
        self.insert("c_summand", whole, new, near, {})
        return new

    def _output(self, value: Value, wanted: Label) -> str:
        like = (
            Variable("literal", value.operand.dtype, ())
            if isinstance(value.operand, Literal)
            else self.program.lookup(value.operand, self.block)
        )
        suffix = "rows" if wanted.is_sharded else "summand" if wanted == SUM else "full"
        return self.new_temporary(like, wanted, suffix)

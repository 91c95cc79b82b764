"""What a group of operators does, its variables numbered: groups with equal texts are equal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxfleet.analysis.slices import joins_slices
from jaxfleet.analysis.uses import OuterUses
from jaxfleet.ir import (
    Attr,
    Attrs,
    BlockRef,
    Kind,
    Literal,
    Operand,
    Operands,
    Operator,
    Program,
    Role,
    Size,
    print_operator,
)
from jaxfleet.ir.values import map_attr
from jaxfleet.passes._effects import Effects


@dataclass(frozen=True)
class LayerForm:
    """A group of operators. A value has a number, its *slot*: what is overwritten gets another.

    Attributes:
        text: says all that the group does, by slots; groups of equal text have equal slots.
        ops: its operators.
        slots: of each operator, what it reads and what it writes.
        types: of every slot, the dtype and the shape.
        inputs: what the group takes from outside, by slot: variables, and all of its literals.
        finals: the slot that each variable written holds when the group ends.
    """

    text: str
    ops: tuple[Operator, ...]
    slots: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    types: tuple[tuple[str, tuple[Size, ...]], ...]
    inputs: Mapping[int, Operand]
    finals: Mapping[str, int]

    @cached_property
    def names(self) -> Mapping[int, str]:
        """The variable that holds each slot when the group ends, of those that were written."""
        return {slot: name for name, slot in self.finals.items()}


class LayerForms:
    """Makes the forms of a program's groups.

    Attributes:
        program: theirs.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._uses, self._effects = OuterUses(program), Effects()

    def of(self, ops: Sequence[Operator]) -> LayerForm | None:
        """Returns a group's form; None, where an operator of it cannot stand in a loop."""
        if not ops or any(self._stays(op) for op in ops):
            return None
        return _Numbering(self.program).of(ops)

    def _stays(self, op: Operator) -> bool:
        """Tells whether it is for the host, or a sub-block uses what it does not say itself."""
        on_host = op.role is Role.RPC or "endpoint" in op.attrs or joins_slices(op)
        if on_host or self._effects.has_effect(op):
            return True
        used = self._uses.of(op)
        inner = used.reads - set(op.reads)
        constant = all(self.program.lookup(name).kind is Kind.CONST for name in inner)
        return not constant or used.writes != set(op.writes)


class _Numbering:
    """Numbers the values of one group."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._held: dict[str, int] = {}
        self._types: list[tuple[str, tuple[Size, ...]]] = []
        self._inputs: dict[int, Operand] = {}
        self._lines: list[str] = []

    def of(self, ops: Sequence[Operator]) -> LayerForm:
        slots, written = list[tuple[tuple[int, ...], tuple[int, ...]]](), dict[str, None]()
        for op in ops:
            reads = tuple(self._read(operand) for operand in op.inputs)
            writes = tuple(self._new(self._type(name)) for name in op.writes)
            self._held.update(zip(op.writes, writes, strict=True))
            written.update(dict.fromkeys(op.writes))
            slots.append((reads, writes))
            self._write(op, reads, writes)
        finals = {name: self._held[name] for name in written}
        text, types = "\n".join(self._lines), tuple(self._types)
        return LayerForm(text, tuple(ops), tuple(slots), types, self._inputs, finals)

    def _read(self, operand: Operand) -> int:
        if isinstance(operand, str) and operand in self._held:
            return self._held[operand]
        slot = self._new(self._type(operand))
        self._inputs[slot] = operand
        if isinstance(operand, str):
            self._held[operand] = slot
        return slot

    def _type(self, operand: Operand) -> tuple[str, tuple[Size, ...]]:
        if isinstance(operand, Literal):
            return operand.dtype, ()
        variable = self._program.lookup(operand)
        return variable.dtype, variable.shape

    def _new(self, type_: tuple[str, tuple[Size, ...]]) -> int:
        self._lines.append(f"v{len(self._types)}: {type_[0]} {[str(size) for size in type_[1]]}")
        self._types.append(type_)
        return len(self._types) - 1

    def _write(self, op: Operator, reads: Sequence[int], writes: Sequence[int]) -> None:
        inputs = op.inputs.replaced([f"v{slot}" for slot in reads])
        outputs = op.outputs.replaced([f"v{slot}" for slot in writes])
        self._lines.append(_text(op, inputs, outputs))
        for index in op.blocks:
            self._write_block(index, {})

    def _write_block(self, index: int, around: Mapping[str, str]) -> None:
        """Writes a sub-block; it names nothing of the group, and constants by their own names."""
        block = self._program.blocks[index]
        own = {name: f"b{len(around) + place}" for place, name in enumerate(block.variables)}
        names = {**around, **own}
        self._lines += [f"{names[name]}: {v.type}" for name, v in block.variables.items()]
        self._lines.append(f"block {[names[name] for name in block.args]}")
        for op in block.ops:
            self._lines.append(_text(op, op.inputs.renamed(names), op.outputs.renamed(names)))
            for inner in op.blocks:
                self._write_block(inner, names)
        self._lines.append(f"results {[str(names.get(str(x), x)) for x in block.results]}")


def _text(op: Operator, inputs: Operands, outputs: Operands) -> str:
    attrs = Attrs({key: map_attr(value, _unnumbered) for key, value in op.attrs.items()})
    plain = replace(op, inputs=inputs, outputs=outputs, attrs=attrs, role=Role.FORWARD, role_var=())
    return print_operator(plain)


def _unnumbered(attr: Attr) -> Attr:
    return BlockRef(0) if isinstance(attr, BlockRef) else attr

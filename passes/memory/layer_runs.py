"""Runs of equal layers: groups of operators with equal text once their variables are numbered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxfleet.analysis.effects import Effects, OuterUses
from jaxfleet.analysis.placement.sliced_layout import joins_slices
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
from jaxfleet.ir.attributes import map_attr


@dataclass(frozen=True)
class LayerForm:
    """A group of operators. A value has a number, its *slot*; an overwrite gets a new slot.

    Attributes:
        text: the complete text of the group, by slots; groups of equal text have equal slots.
        ops: its operators.
        slots: the inputs and outputs of each operator.
        types: the dtype and the shape of every slot.
        inputs: the group's inputs, by slot: variables, and all of its literals.
        finals: the slot that each written variable holds when the group ends.
    """

    text: str
    ops: tuple[Operator, ...]
    slots: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    types: tuple[tuple[str, tuple[Size, ...]], ...]
    inputs: Mapping[int, Operand]
    finals: Mapping[str, int]

    @cached_property
    def names(self) -> Mapping[int, str]:
        """The variable that holds each slot when the group ends, among written ones."""
        return {slot: name for name, slot in self.finals.items()}


class LayerForms:
    """Makes the forms of a program's groups."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._uses, self._effects = OuterUses(program), Effects()

    def of(self, ops: Sequence[Operator]) -> LayerForm | None:
        """Returns a group's form; None if one of its operators cannot be in a loop."""
        if not ops or any(self._stays(op) for op in ops):
            return None
        return _Numbering(self.program).of(ops)

    def _stays(self, op: Operator) -> bool:
        """Whether an operator is for the host, or its sub-block has undeclared uses."""
        on_host = op.role is Role.RPC or "endpoint" in op.attrs or joins_slices(op)
        if on_host or self._effects.has_effect(op):
            return True
        used = self._uses.of(op)
        inner = used.reads - set(op.reads)
        constant = all(self.program.lookup(name).kind is Kind.CONST for name in inner)
        return not constant or used.writes != set(op.writes)


class _Numbering:
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
        """Writes a sub-block without names of the group's variables; constants keep theirs."""
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


@dataclass(frozen=True)
class LayerRun:
    """Consecutive groups that can be the iterations of one loop.

    Attributes:
        first: the index of the first among the program's groups.
        forms: the groups; their texts are equal.
        carried: inputs from the previous group: slot, and the slot that it was made as.
    """

    first: int
    forms: tuple[LayerForm, ...]
    carried: Mapping[int, int]

    @property
    def count(self) -> int:
        return len(self.forms)

    @property
    def end(self) -> int:
        return self.first + self.count

    @cached_property
    def constant(self) -> Mapping[int, Operand]:
        """Operands that are equal in all iterations, by slot."""
        first = self.forms[0].inputs
        return {slot: first[slot] for slot in self._others if len(set(self.taken(slot))) == 1}

    @cached_property
    def updated(self) -> Mapping[int, int]:
        """Slots that each iteration overwrites in its own variable, with the slots after that."""
        found = {}
        for slot in self._others:
            new = {
                form.finals.get(name) if isinstance(name, str) else None
                for form, name in zip(self.forms, self.taken(slot), strict=True)
            }
            if len(new) == 1 and (at := new.pop()) is not None:
                found[slot] = at
        return found

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The slots with a different, read-only operand in each iteration."""
        return tuple(s for s in self._others if s not in self.constant and s not in self.updated)

    def taken(self, slot: int) -> list[Operand]:
        return [form.inputs[slot] for form in self.forms]

    def made(self, slot: int) -> list[str | None]:
        """Returns each group's variable that holds a slot at the end; None if later overwritten."""
        last = {name: n for n, form in enumerate(self.forms) for name in form.finals}
        names = [form.names.get(slot) for form in self.forms]
        return [name if name and last[name] == n else None for n, name in enumerate(names)]

    @property
    def _others(self) -> list[int]:
        return [slot for slot in self.forms[0].inputs if slot not in self.carried]


def find_runs(forms: Sequence[LayerForm | None], least: int) -> list[LayerRun]:
    """Returns the runs of at least `least` groups, in order; None cannot be in a loop."""
    found, first = list[LayerRun](), 0
    while first < len(forms):
        run = _from(forms, first)
        if run is None or run.count < least:
            first += 1
        else:
            found.append(run)
            first = run.end
    return found


def _from(forms: Sequence[LayerForm | None], first: int) -> LayerRun | None:
    form = forms[first]
    if form is None:
        return None
    run, carried, written = [form], dict[int, int](), set(form.finals)
    for after in forms[first + 1 :]:
        if after is None or after.text != form.text:
            break
        links = _links(run[-1], after)
        if len(run) == 1:
            carried = links
        if links != carried or not _is_fed(after, links, written):
            break
        run.append(after)
        written.update(after.finals)
    return LayerRun(first, tuple(run), carried)


def _links(before: LayerForm, after: LayerForm) -> dict[int, int]:
    """Returns the inputs that a group takes from the previous one."""
    return {
        slot: before.finals[name]
        for slot, name in after.inputs.items()
        if isinstance(name, str) and name in before.finals
    }


def _is_fed(form: LayerForm, links: Mapping[int, int], written: set[str]) -> bool:
    """Whether a group's inputs from within the run come from the previous group only."""
    if any(form.types[slot] != form.types[at] for slot, at in links.items()):
        return False
    others = (name for slot, name in form.inputs.items() if slot not in links)
    return not any(name in written for name in others if isinstance(name, str))

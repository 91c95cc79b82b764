"""The IR: Program, Block and Operator, all immutable; a rewrite returns a new Program.

A Program has variables that outlive an operator's block (data, param, state, const) and blocks.
Block 0 is the root; an operator with sub-blocks names them in its attributes (`^1`). A block sees
its own variables, those of the enclosing blocks and those of the program; a block made from a jax
function also has arguments and results. State is updated in place: the value of a `param` or
`state` variable at the end of block 0 is its value in the next step.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import overload

from jaxfleet.errors import ProgramError
from jaxfleet.ir.attributes import Attrs, BlockRef, Literal, Operand
from jaxfleet.ir.dims import Size
from jaxfleet.ir.source import Source
from jaxfleet.ir.variable import Kind, Variable

NO_SOURCE = Source()


class Role(enum.Enum):
    """The part of a training step that an operator belongs to; passes select on it."""

    FORWARD = "forward"
    FORWARD_LOSS = "forward|loss"
    BACKWARD = "backward"
    BACKWARD_LOSS = "backward|loss"
    OPTIMIZE = "optimize"
    OPTIMIZE_LR_SCHED = "optimize|lr_sched"
    LR_SCHED = "lr_sched"
    RPC = "rpc"
    DIST = "dist"

    @property
    def is_forward(self) -> bool:
        """Whether it is part of forward, the loss included."""
        return self in (Role.FORWARD, Role.FORWARD_LOSS)


class Operands(Sequence[Operand]):
    """An operator's inputs or outputs: ordered (slot, operands) pairs.

    As a sequence it contains all operands in order, whatever their slots.
    """

    __slots__ = ("_flat", "_names", "slots")

    def __init__(self, slots: Iterable[tuple[str, tuple[Operand, ...]]] = ()) -> None:
        self.slots: tuple[tuple[str, tuple[Operand, ...]], ...] = _joined(slots)
        if len(self.slots) == 1:
            self._flat: tuple[Operand, ...] = self.slots[0][1]
        else:
            self._flat = tuple(item for _, items in self.slots for item in items)
        self._names: tuple[str, ...] = tuple(x for x in self._flat if isinstance(x, str))

    @classmethod
    def of(cls, *operands: Operand) -> "Operands":
        """Returns operands in one unnamed slot."""
        return cls((("", operands),) if operands else ())

    @classmethod
    def named(cls, **slots: Operand | Sequence[Operand]) -> "Operands":
        """Returns operands in named slots: `Operands.named(X="x", Y=["a", "b"])`."""
        return cls(
            (slot, (items,) if isinstance(items, str | Literal) else tuple(items))
            for slot, items in slots.items()
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The variables among the operands, in order, without literals."""
        return self._names

    def slot(self, name: str) -> tuple[Operand, ...]:
        """Returns the operands of a slot, empty if there is no such slot."""
        return next((items for slot, items in self.slots if slot == name), ())

    def renamed(self, names: Mapping[str, Operand]) -> "Operands":
        """Returns the same slots with variables replaced."""
        if names.keys().isdisjoint(self._names):
            return self
        return Operands(
            (slot, tuple(names.get(x, x) if isinstance(x, str) else x for x in items))
            for slot, items in self.slots
        )

    def replaced(self, flat: Sequence[Operand]) -> "Operands":
        """Returns the same slots, of the same lengths, with other operands."""
        rest = iter(flat)
        return Operands((slot, tuple(next(rest) for _ in items)) for slot, items in self.slots)

    @overload
    def __getitem__(self, index: int) -> Operand: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Operand, ...]: ...
    def __getitem__(self, index: int | slice) -> Operand | tuple[Operand, ...]:
        return self._flat[index]

    def __len__(self) -> int:
        return len(self._flat)

    def __iter__(self) -> Iterator[Operand]:
        return iter(self._flat)

    def __contains__(self, operand: object) -> bool:
        return operand in self._flat

    def __add__(self, other: "Operands") -> "Operands":
        merged = dict(self.slots)
        for slot, items in other.slots:
            merged[slot] = merged.get(slot, ()) + items
        return Operands(merged.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operands) and self.slots == other.slots

    def __hash__(self) -> int:
        return hash(self.slots)

    def __repr__(self) -> str:
        return f"Operands({self.slots!r})"


def _joined(
    slots: Iterable[tuple[str, tuple[Operand, ...]]],
) -> tuple[tuple[str, tuple[Operand, ...]], ...]:
    """Returns the slots with all unnamed operands in one slot, which goes first."""
    bare: tuple[Operand, ...] = ()
    named = []
    for slot, items in slots:
        if slot:
            named.append((slot, tuple(items)))
        else:
            bare += tuple(items)
    return (("", bare), *named) if bare else tuple(named)


NO_OPERANDS = Operands()
NO_ATTRS = Attrs()


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator.

    Attributes:
        type: its operator type, a name in `jaxfleet.ops`: `jax.dot_general`, `sgd`.
        inputs: variables and literals that it reads.
        outputs: variables that it writes.
        attrs: its parameters; sub-blocks are `BlockRef`s among them.
        role: the part of the step it belongs to.
        role_var: its (parameter, gradient) pairs.
        source: the user's line; ignored in comparisons.
    """

    type: str
    inputs: Operands = NO_OPERANDS
    outputs: Operands = NO_OPERANDS
    attrs: Attrs = NO_ATTRS
    role: Role = Role.FORWARD
    role_var: tuple[tuple[str, str], ...] = ()
    source: Source = field(default=NO_SOURCE, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Convenience for passes: `attrs={"axis": 0}` and `inputs=["x"]`.
        if not isinstance(self.attrs, Attrs):
            object.__setattr__(self, "attrs", Attrs(self.attrs))
        if not isinstance(self.inputs, Operands):
            object.__setattr__(self, "inputs", _as_operands("inputs", self.inputs))
        if not isinstance(self.outputs, Operands):
            object.__setattr__(self, "outputs", _as_operands("outputs", self.outputs))

    @property
    def reads(self) -> tuple[str, ...]:
        return self.inputs.names

    @property
    def writes(self) -> tuple[str, ...]:
        return self.outputs.names

    @property
    def blocks(self) -> tuple[int, ...]:
        """The indices of its sub-blocks, in the order of its attributes."""
        refs = self.attrs.block_refs
        return tuple(ref.index for ref in refs) if refs else ()

    def __str__(self) -> str:
        from jaxfleet.ir.printer import print_operator  # noqa: PLC0415  # text is built on this module

        return print_operator(self)


def _as_operands(field_name: str, given: object) -> Operands:
    """Makes operands of a sequence (one unnamed slot) or of a mapping (slot to operands).

    Anything else is a ProgramError; a string would become one variable per letter.
    """
    if isinstance(given, Mapping):
        return Operands.named(**given)
    if isinstance(given, Sequence) and not isinstance(given, str):
        return Operands.of(*given)
    message = f"an operator's {field_name} cannot be {given!r}"
    raise ProgramError(message, hint='give a list of variables: ["x"], or slots: {"X": ["x"]}')


@dataclass(frozen=True)
class Block:
    """A list of operators with their local variables.

    Attributes:
        index: its place in the program.
        parent: the index of the enclosing block, whose variables it sees; -1 for block 0.
        variables: name to Variable, arguments included.
        args: names of its arguments, for a block that is a function.
        ops: in execution order.
        results: names of its results, for a block that is a function.
    """

    index: int = 0
    parent: int = -1
    variables: Mapping[str, Variable] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    ops: tuple[Operator, ...] = ()
    results: tuple[Operand, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "variables", MappingProxyType(dict(self.variables)))
        object.__setattr__(self, "ops", tuple(self.ops))

    def with_ops(self, ops: Iterable[Operator], *, declare: Iterable[Variable] = ()) -> "Block":
        """Returns the block with other operators, and with more variables declared."""
        more = {variable.name: variable for variable in declare}
        variables = {**self.variables, **more} if more else self.variables
        return replace(self, ops=tuple(ops), variables=variables)

    def without_unused(self, *, keep: Iterable[str] = ()) -> "Block":
        """Returns the block without the variables that it does not mention."""
        used = set(keep) | set(self.args)
        used |= {item for item in self.results if isinstance(item, str)}
        for op in self.ops:
            used.update(op.reads, op.writes)
        kept = {name: variable for name, variable in self.variables.items() if name in used}
        return self if len(kept) == len(self.variables) else replace(self, variables=kept)

    def __hash__(self) -> int:
        return hash((self.index, self.args, self.ops, self.results))

    def __repr__(self) -> str:
        return f"Block({self.index}, parent={self.parent}: {len(self.ops)} operators)"


@dataclass(frozen=True)
class Program:
    """A whole program.

    Attributes:
        name: its name in text.
        variables: name to Variable, those that do not belong to one block.
        blocks: block 0 is the root.
        attrs: attributes of the whole: `role="trainer"`.
    """

    name: str = "main"
    variables: Mapping[str, Variable] = field(default_factory=dict)
    blocks: tuple[Block, ...] = (Block(),)
    attrs: Attrs = NO_ATTRS

    def __post_init__(self) -> None:
        object.__setattr__(self, "variables", MappingProxyType(dict(self.variables)))
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if not isinstance(self.attrs, Attrs):
            object.__setattr__(self, "attrs", Attrs(self.attrs))

    @property
    def root(self) -> Block:
        return self.blocks[0]

    def with_blocks(self, blocks: Iterable[Block]) -> "Program":
        return replace(self, blocks=tuple(blocks))

    def with_block(self, block: Block) -> "Program":
        """Returns the program with the block of that index replaced."""
        blocks = list(self.blocks)
        blocks[block.index] = block
        return replace(self, blocks=tuple(blocks))

    def of_kind(self, *kinds: Kind) -> tuple[Variable, ...]:
        """Returns the program's variables of these kinds, in order of declaration."""
        return tuple(v for v in self.variables.values() if v.kind in kinds)

    def lookup(self, name: str, block: Block | None = None) -> Variable:
        """Returns the variable of a name in a block, block 0 by default.

        Raises:
            ProgramError: no such variable is visible there.
        """
        at = block if block is not None else self.root
        for scope in self.scopes(at):
            if name in scope:
                return scope[name]
        what = f"'{name}' is not declared in block {at.index} of program '{self.name}'"
        raise ProgramError(what)

    def scopes(self, block: Block) -> Iterator[Mapping[str, Variable]]:
        """Yields the scopes visible to a block, innermost first."""
        at = block
        while True:
            yield at.variables
            if at.parent < 0:
                break
            at = self.blocks[at.parent]
        yield self.variables

    @cached_property
    def op_count(self) -> int:
        """The number of operators in all blocks."""
        return sum(len(block.ops) for block in self.blocks)

    def __str__(self) -> str:
        from jaxfleet.ir.printer import print_program  # noqa: PLC0415  # text is built on this module

        return print_program(self)

    def __repr__(self) -> str:
        """One line, since debuggers and notebooks show it unasked; `str` is the whole text."""
        blocks = f", {len(self.blocks)} blocks" if len(self.blocks) > 1 else ""
        variables = len(self.variables)
        return f"Program('{self.name}': {self.op_count} operators{blocks}, {variables} variables)"

    def _repr_html_(self) -> str:
        """The text in colours, for notebooks; cut short where it is long."""
        from jaxfleet.ir.program_html import program_html  # noqa: PLC0415  # text is built on this module

        return program_html(self)

    def __hash__(self) -> int:
        return hash((self.name, self.blocks, self.attrs))


def block_of(program: Program, ref: object) -> Block:
    """Returns the block that an attribute refers to.

    Raises:
        ProgramError: the attribute is not a reference to a block of this program.
    """
    if isinstance(ref, BlockRef) and 0 <= ref.index < len(program.blocks):
        return program.blocks[ref.index]
    what = f"{ref!r} does not name one of the {len(program.blocks)} blocks of '{program.name}'"
    raise ProgramError(what)


def shape_of(program: Program, operand: Operand, block: Block | None = None) -> tuple[Size, ...]:
    """Returns the shape of a variable, or `()` for a literal."""
    return () if isinstance(operand, Literal) else program.lookup(operand, block).shape

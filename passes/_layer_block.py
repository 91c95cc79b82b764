"""The block that a loop over layers runs, while it is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.ir import Attr, Attrs, Block, Literal, Operand, Operands, Operator, Size, Variable
from jaxfleet.ir.names import layer_name
from jaxfleet.passes._copies import Copies
from jaxfleet.passes._layer_forms import LayerForm
from jaxfleet.passes._layer_stacks import LayerStacks

_FIRST = Literal.of(0, "i32")


@dataclass
class LayerBlock:
    """Writes the operators of one turn.

    Attributes:
        form: what a turn does.
        stacks: knows names that are free.
        copies: takes the block.
        held: what holds a slot of the form in the block.
    """

    form: LayerForm
    stacks: LayerStacks
    copies: Copies
    held: dict[int, Operand] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = len(self.copies.program.blocks) + len(self.copies.blocks)
        self.copies.blocks.append(Block(self.index, 0))  # those inside come behind it
        self._variables: dict[str, Variable] = {}
        self._ops: list[Operator] = []

    def new(self, name: Operand, dtype: str, shape: Sequence[Size]) -> str:
        """Returns the name of a new variable of the block: `w@LAYER` for `w`."""
        name = self.stacks.free(layer_name(name if isinstance(name, str) else "value"))
        self._variables[name] = Variable(name, dtype, tuple(shape))
        return name

    def run(self) -> None:
        """Writes what the form does, with what is held."""
        for op, (reads, writes) in zip(self.form.ops, self.form.slots, strict=True):
            for slot, name in zip(writes, op.writes, strict=True):
                self.held[slot] = self.new(name, *self.form.types[slot])
            copied = self.copies.of(op, {}, self.index)
            inputs = op.inputs.replaced([self.held[slot] for slot in reads])
            outputs = op.outputs.replaced([self.held[slot] for slot in writes])
            self._ops.append(replace(copied, inputs=inputs, outputs=outputs, role_var=()))

    def taken_out(self, stack: str, place: Operand, like: Operand) -> str:
        """Returns what lies in a place of an array, under a name like another."""
        dtype, (_, *shape) = self._variables[stack].dtype, self._variables[stack].shape
        one, value = self.new(like, dtype, (1, *shape)), self.new(like, dtype, shape)
        where, sizes = (place, *(_FIRST for _ in shape)), (1, *shape)
        self._add("jax.dynamic_slice", (stack, *where), one, {"slice_sizes": sizes})
        self._add("jax.squeeze", (one,), value, {"dimensions": (0,)})
        return value

    def put_in(self, stack: str, place: Operand, value: Operand, like: Operand) -> str:
        """Returns an array with a value in a place of it, under a name like another."""
        dtype, shape = self._variables[stack].dtype, self._variables[stack].shape
        one, new = self.new(like, dtype, (1, *shape[1:])), self.new(like, dtype, shape)
        axes = tuple(range(1, len(shape)))
        attrs: dict[str, Attr] = {"broadcast_dimensions": axes, "shape": (1, *shape[1:])}
        self._add("jax.broadcast_in_dim", (value,), one, attrs)
        where = (place, *(_FIRST for _ in axes))
        self._add("jax.dynamic_update_slice", (stack, one, *where), new, {})
        return new

    def end(self, args: Sequence[str], results: Sequence[Operand]) -> None:
        """Puts the block among the copies."""
        block = Block(self.index, 0, self._variables, tuple(args), tuple(self._ops), tuple(results))
        self.copies.blocks[self.index - len(self.copies.program.blocks)] = block

    def _add(
        self, op_type: str, reads: Sequence[Operand], out: str, attrs: Mapping[str, Attr]
    ) -> None:
        like = self.form.ops[0]
        made = Operator(op_type, Operands.of(*reads), Operands.of(out), Attrs(attrs))
        self._ops.append(replace(made, role=like.role, source=like.source))

"""Writes a run of equal layers as one loop: `jax.scan` over a block that is the layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    BlockRef,
    Literal,
    Operand,
    Operands,
    Operator,
    Role,
    Size,
    Variable,
)
from jaxfleet.ir.naming import layer_name, layers_name
from jaxfleet.passes.memory.layer_runs import LayerForm, LayerRun
from jaxfleet.passes.memory.layer_stacks import LayerStacks, Steps
from jaxfleet.passes.shared.copies import OperatorCopies

_FIRST = Literal.of(0, "i32")


@dataclass
class LayerBlock:
    """Writes the operators of one iteration; `held` maps the form's slots to operands."""

    form: LayerForm
    stacks: LayerStacks
    copies: OperatorCopies
    held: dict[int, Operand] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = len(self.copies.program.blocks) + len(self.copies.blocks)
        self.copies.blocks.append(Block(self.index, 0))  # its sub-blocks follow it
        self._variables: dict[str, Variable] = {}
        self._ops: list[Operator] = []

    def new(self, name: Operand, dtype: str, shape: Sequence[Size]) -> str:
        """Returns the name of a new variable of the block: `w@LAYER` for `w`."""
        name = self.stacks.free(layer_name(name if isinstance(name, str) else "value"))
        self._variables[name] = Variable(name, dtype, tuple(shape))
        return name

    def run(self) -> None:
        for op, (reads, writes) in zip(self.form.ops, self.form.slots, strict=True):
            for slot, name in zip(writes, op.writes, strict=True):
                self.held[slot] = self.new(name, *self.form.types[slot])
            copied = self.copies.of(op, {}, self.index)
            inputs = op.inputs.replaced([self.held[slot] for slot in reads])
            outputs = op.outputs.replaced([self.held[slot] for slot in writes])
            self._ops.append(replace(copied, inputs=inputs, outputs=outputs, role_var=()))

    def taken_out(self, stack: str, place: Operand, like: Operand) -> str:
        """Returns an element of an array, under a name derived from `like`."""
        dtype, (_, *shape) = self._variables[stack].dtype, self._variables[stack].shape
        one, value = self.new(like, dtype, (1, *shape)), self.new(like, dtype, shape)
        where, sizes = (place, *(_FIRST for _ in shape)), (1, *shape)
        self._add("jax.dynamic_slice", (stack, *where), one, {"slice_sizes": sizes})
        self._add("jax.squeeze", (one,), value, {"dimensions": (0,)})
        return value

    def put_in(self, stack: str, place: Operand, value: Operand, like: Operand) -> str:
        """Returns an array with an element replaced, under a name derived from `like`."""
        dtype, shape = self._variables[stack].dtype, self._variables[stack].shape
        one, new = self.new(like, dtype, (1, *shape[1:])), self.new(like, dtype, shape)
        axes = tuple(range(1, len(shape)))
        attrs: dict[str, Attr] = {"broadcast_dimensions": axes, "shape": (1, *shape[1:])}
        self._add("jax.broadcast_in_dim", (value,), one, attrs)
        where = (place, *(_FIRST for _ in axes))
        self._add("jax.dynamic_update_slice", (stack, one, *where), new, {})
        return new

    def end(self, args: Sequence[str], results: Sequence[Operand]) -> None:
        block = Block(self.index, 0, self._variables, tuple(args), tuple(self._ops), tuple(results))
        self.copies.blocks[self.index - len(self.copies.program.blocks)] = block

    def _add(
        self, op_type: str, reads: Sequence[Operand], out: str, attrs: Mapping[str, Attr]
    ) -> None:
        like = self.form.ops[0]
        made = Operator(op_type, Operands.of(*reads), Operands.of(out), Attrs(attrs))
        self._ops.append(replace(made, role=like.role, source=like.source))


_EACH = Steps(0, 1)


@dataclass
class _CarriedValue:
    """A carried value: its names outside, in the block, and at the end."""

    given: Operand
    arg: str
    out: str
    result: Operand = ""  # in the block, at its end


@dataclass
class LayerLoop:
    """Makes the operators of one loop; `is_live` is for variables read after the run."""

    run: LayerRun
    stacks: LayerStacks
    copies: OperatorCopies
    is_live: Callable[[str], bool]
    _before: list[Operator] = field(default_factory=list)
    _consts: dict[str, str] = field(default_factory=dict)  # outer name -> name in the block
    _carried: dict[int, _CarriedValue] = field(default_factory=dict)  # by the slot handed on
    _updated: dict[int, _CarriedValue] = field(default_factory=dict)  # by the slot of the new value
    _sliced: dict[str, str] = field(default_factory=dict)  # outer name -> name in the block
    _numbers: dict[tuple[Steps, str], str] = field(default_factory=dict)
    _made: dict[str, Operand] = field(default_factory=dict)  # outer name -> operand in the block
    _lies: dict[str, list[str | None]] = field(default_factory=dict)  # in output arrays

    def __post_init__(self) -> None:
        self._form = self.run.forms[0]
        self._block = LayerBlock(self._form, self.stacks, self.copies)

    def ops(self) -> list[Operator]:
        self._take()
        self._block.run()
        self._give()
        loop = self._loop()
        for form in self.run.forms:
            self.stacks.forget(form.finals)
        after = [op for stack, names in self._lies.items() for op in self._let_out(stack, names)]
        roles = {op.role for form in self.run.forms for op in form.ops}
        only = next(iter(roles)) if len(roles) == 1 else None
        role, last = only or Role.BACKWARD, only or Role.OPTIMIZE
        made = [replace(op, role=role) for op in (*self._before, loop)]
        made += [replace(op, role=last) for op in after]
        return [replace(op, source=self._form.ops[0].source) for op in made]

    def _take(self) -> None:
        """Finds the operand of each slot at the start of an iteration."""
        run, held = self.run, self._block.held
        for slot, operand in run.constant.items():
            held[slot] = operand if isinstance(operand, Literal) else self._const(operand)
        for slot, at in run.carried.items():
            given, type_ = self._form.inputs[slot], self._form.types[slot]
            self._before += self.stacks.needed([given])
            held[slot] = arg = self._block.new(given, *type_)
            out = run.forms[-1].names.get(at) or self.stacks.new(layers_name("value"), *type_)
            self._carried[at] = _CarriedValue(given, arg, out)
        for slot, at in run.updated.items():
            stack = self._stack(slot)
            type_ = self.stacks.type(stack)
            arg, out = self._block.new(stack, *type_), self.stacks.new(stack, *type_)
            held[slot] = self._block.taken_out(
                arg, self._number(_EACH, "i32"), self._form.inputs[slot]
            )
            self._updated[at] = _CarriedValue(stack, arg, out)
        for slot in run.own:
            held[slot] = self._own(slot)

    def _own(self, slot: int) -> str:
        """Returns the operand of a slot that differs between iterations."""
        operands, (dtype, shape) = self.run.taken(slot), self._form.types[slot]
        if (found := self.stacks.steps_in(operands)) is not None:
            stack, place = self._const(found[0]), self._number(found[1], "i32")
            return self._block.taken_out(stack, place, operands[0])
        if (steps := _whole_numbers(operands)) is not None:
            return self._number(steps, dtype)
        stack = self._stack(slot)
        self._sliced[stack] = self._block.new(operands[0], dtype, shape)
        return self._sliced[stack]

    def _const(self, name: str) -> str:
        if name not in self._consts:
            self._before += self.stacks.needed([name])
            self._consts[name] = self._block.new(name, *self.stacks.type(name))
        return self._consts[name]

    def _stack(self, slot: int) -> str:
        operands = self.run.taken(slot)
        self._before += self.stacks.needed(operands)
        stack, op = self.stacks.put_together(operands)
        self._before.append(op)
        return stack

    def _number(self, steps: Steps, dtype: str) -> str:
        if (steps, dtype) not in self._numbers:
            outside, ops = self.stacks.numbers(steps, self.run.count, dtype)
            self._before += ops
            self._numbers[steps, dtype] = self._sliced[outside] = self._block.new(
                "place", dtype, ()
            )
        return self._numbers[steps, dtype]

    def _give(self) -> None:
        """Collects the outputs: the last iteration's, or a stack of all."""
        for at, carried in self._updated.items():
            place = self._number(_EACH, "i32")
            name, value = self._form.names.get(at, carried.given), self._block.held[at]
            carried.result = self._block.put_in(carried.arg, place, value, name)
            self._lies[carried.out] = self.run.made(at)
        for at, carried in self._carried.items():
            carried.result = self._block.held[at]
        for at in sorted({slot for form in self.run.forms for slot in form.finals.values()}):
            names = self.run.made(at)
            live = [name for name in names if name and self.is_live(name)]
            if at not in self._updated and not self._handed_on.issuperset(live):
                self._give_all(at, names)

    def _give_all(self, at: int, names: list[str | None]) -> None:
        """Records a stack of a slot's values in all iterations.

        For a carried value it holds the initial value of each iteration: the last result is an
        output anyway, and backward reads the initial values of forward's iterations.
        """
        value = self._block.held[at]
        if (carried := self._carried.get(at)) is not None and names[-1] in self._handed_on:
            first = carried.given
            value, names = carried.arg, [first if isinstance(first, str) else None, *names[:-1]]
        dtype, shape = self._form.types[at]
        name = next(name for name in names if name)
        stack = self.stacks.new(layers_name(name), dtype, (self.run.count, *shape))
        self._made[stack], self._lies[stack] = value, names

    @property
    def _handed_on(self) -> set[str]:
        """The carried outputs of the last iteration."""
        return {carried.out for carried in self._carried.values()}

    def _loop(self) -> Operator:
        """Ends the block, and returns the scan."""
        carried = (*self._carried.values(), *self._updated.values())
        args = (*self._consts.values(), *(x.arg for x in carried), *self._sliced.values())
        self._block.end(args, [*(x.result for x in carried), *self._made.values()])
        inputs = Operands.of(*self._consts, *(x.given for x in carried), *self._sliced)
        outputs = Operands.of(*(x.out for x in carried), *self._made)
        attrs: dict[str, Attr] = {
            "body": BlockRef(self._block.index),
            "length": self.run.count,
            "num_carry": len(carried),
            "num_consts": len(self._consts),
            "reverse": False,
            "unroll": 1,
        }
        pairs = tuple(x for form in self.run.forms for op in form.ops for x in op.role_var)
        return Operator("jax.scan", inputs, outputs, Attrs(attrs), role_var=pairs)

    def _let_out(self, stack: str, names: Sequence[str | None]) -> Iterator[Operator]:
        """Yields the operators that unstack state; temporaries stay stacked."""
        made = {name for form in self.run.forms for name in form.finals} - self._handed_on
        live = {name for name in names if name in made and self.is_live(name)}
        for place, name in enumerate(names):
            if name in live and self.copies.program.lookup(name).kind.persistable:
                yield from self.stacks.taken_out(name, stack, place)
        self.stacks.hold(stack, names, live)


def _whole_numbers(operands: Sequence[Operand]) -> Steps | None:
    """Returns integer literals as steps, if evenly spaced."""
    values = [x.value for x in operands if isinstance(x, Literal)]
    whole = [value for value in values if type(value) is int]
    return Steps.of(whole) if len(whole) == len(operands) else None

"""Writes a run of equal groups as one loop: `jax.scan` over a block that is the group."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.ir import Attr, Attrs, BlockRef, Literal, Operand, Operands, Operator, Role
from jaxfleet.ir.names import layers_name
from jaxfleet.passes._copies import Copies
from jaxfleet.passes._layer_block import LayerBlock
from jaxfleet.passes._layer_runs import LayerRun
from jaxfleet.passes._layer_stacks import LayerStacks, Steps

_EACH = Steps(0, 1)


@dataclass
class _Carried:
    """What a turn hands to the next: from outside, in the block, and out again."""

    given: Operand
    arg: str
    out: str
    result: Operand = ""  # in the block, at its end


@dataclass
class LayerLoop:
    """Makes the operators of one loop.

    Attributes:
        run: the groups.
        stacks: what lies in arrays of several turns.
        copies: takes the block.
        is_live: tells whether a variable is read behind the run, or outlives the step.
    """

    run: LayerRun
    stacks: LayerStacks
    copies: Copies
    is_live: Callable[[str], bool]
    _before: list[Operator] = field(default_factory=list)
    _consts: dict[str, str] = field(default_factory=dict)  # outside, and in the block
    _carried: dict[int, _Carried] = field(default_factory=dict)  # by the slot handed on
    _updated: dict[int, _Carried] = field(default_factory=dict)  # by the slot of the new value
    _sliced: dict[str, str] = field(default_factory=dict)  # outside, and in the block
    _numbers: dict[tuple[Steps, str], str] = field(default_factory=dict)
    _made: dict[str, Operand] = field(default_factory=dict)  # outside, and in the block
    _lies: dict[str, list[str | None]] = field(default_factory=dict)  # in arrays that come out

    def __post_init__(self) -> None:
        self._form = self.run.forms[0]
        self._block = LayerBlock(self._form, self.stacks, self.copies)

    def ops(self) -> list[Operator]:
        """Returns the operators that stand for the run."""
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
        """Finds what holds each slot at the start of a turn."""
        run, held = self.run, self._block.held
        for slot, operand in run.constant.items():
            held[slot] = operand if isinstance(operand, Literal) else self._const(operand)
        for slot, at in run.carried.items():
            given, type_ = self._form.inputs[slot], self._form.types[slot]
            self._before += self.stacks.needed([given])
            held[slot] = arg = self._block.new(given, *type_)
            out = run.forms[-1].names.get(at) or self.stacks.new(layers_name("value"), *type_)
            self._carried[at] = _Carried(given, arg, out)
        for slot, at in run.updated.items():
            stack = self._stack(slot)
            type_ = self.stacks.type(stack)
            arg, out = self._block.new(stack, *type_), self.stacks.new(stack, *type_)
            held[slot] = self._block.taken_out(
                arg, self._number(_EACH, "i32"), self._form.inputs[slot]
            )
            self._updated[at] = _Carried(stack, arg, out)
        for slot in run.own:
            held[slot] = self._own(slot)

    def _own(self, slot: int) -> str:
        """Returns what holds a slot that each turn has something of its own for."""
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
        """Returns what holds a turn's number."""
        if (steps, dtype) not in self._numbers:
            outside, ops = self.stacks.numbers(steps, self.run.count, dtype)
            self._before += ops
            self._numbers[steps, dtype] = self._sliced[outside] = self._block.new(
                "place", dtype, ()
            )
        return self._numbers[steps, dtype]

    def _give(self) -> None:
        """Finds what comes out: of the last turn, or of each in an array."""
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
        """Notes an array of what all turns make of a slot.

        Of what is carried it holds what turns begin with: what the last one ends with comes out
        anyway, and backward reads what the turns of forward began with.
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
        """What the last turn hands on: it comes out by itself."""
        return {carried.out for carried in self._carried.values()}

    def _loop(self) -> Operator:
        """Returns the operator, and ends its block."""
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
        """Yields what writes the state that lies in an array; temporaries stay there."""
        made = {name for form in self.run.forms for name in form.finals} - self._handed_on
        live = {name for name in names if name in made and self.is_live(name)}
        for place, name in enumerate(names):
            if name in live and self.copies.program.lookup(name).kind.persistable:
                yield from self.stacks.taken_out(name, stack, place)
        self.stacks.hold(stack, names, live)


def _whole_numbers(operands: Sequence[Operand]) -> Steps | None:
    """Returns whole numbers as steps, where they are such."""
    values = [x.value for x in operands if isinstance(x, Literal)]
    whole = [value for value in values if type(value) is int]
    return Steps.of(whole) if len(whole) == len(operands) else None

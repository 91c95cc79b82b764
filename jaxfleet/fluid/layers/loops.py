"""Loops: `While`, `while_loop`, and the block of one time step of `StaticRNN` and `DynamicRNN`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.types import VarType
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.control_flow import captured_names, flattened
from jaxfleet.fluid.layers.tensor import assign
from jaxfleet.fluid.layers.tensor_arrays import room_in_loop
from jaxfleet.ir import Size


class While:
    """Runs a block while a condition, bool[1], which the block recomputes, is true.

    ::

        i = layers.fill_constant([1], "int64", 0)
        n = layers.fill_constant([1], "int64", 10)
        go_on = layers.less_than(i, n)
        loop = layers.While(go_on)
        with loop.block():
            layers.assign(layers.fc(x, 8, param_attr="w"), x)
            layers.increment(i)
            layers.less_than(i, n, cond=go_on)

    It is differentiable. If a constant limits the iterations, as here, the values of each one are
    kept for backward; otherwise those of at most 64 are, and the others are recomputed. `is_test`
    has no effect: values are kept only if the program has a backward.

    Raises:
        WrongTypeError: the condition is not a boolean variable of one element.
    """

    def __init__(self, cond: Variable, is_test: bool = False, name: str | None = None) -> None:
        check_type(cond, "the condition of a While", Variable)
        if cond.dtype != "bool" or cond.sizes not in {(), (1,)}:
            what = f"the condition of a While is bool[1], and '{cond.name}' is {cond}"
            raise mistake(what, "such as less_than(i, n)", WrongTypeError)
        del is_test
        self.cond_var = cond
        self.helper = LayerHelper("while", name)

    @contextmanager
    def block(self) -> Iterator[None]:
        """Opens the block, which must recompute the condition."""
        program = self.helper.main_program
        inner = program._create_block()
        with open_loop(program, inner):
            try:
                yield
            finally:
                program._rollback()
        read, written = captured_names(inner)
        if self.cond_var.name not in written:
            what = f"the block of a While never writes its condition '{self.cond_var.name}'"
            raise mistake(what, f"end it with less_than(..., cond={self.cond_var.name})")
        loop = program.current_block().append_op(
            "while", {"X": read, "Condition": self.cond_var}, {"Out": written}, {"sub_block": inner}
        )
        if not program._open_loops:
            room_in_loop(loop)


@contextmanager
def open_loop(program: Program, inner: Block) -> Iterator[None]:
    """Marks a block as an open loop while it is built."""
    program._open_loops.append(inner.idx)
    try:
        yield
    finally:
        program._open_loops.pop()


def while_loop(
    cond: Callable[..., Variable],
    body: Callable[..., Any],
    loop_vars: Sequence[Any],
    is_test: bool = False,
    name: str | None = None,
) -> Sequence[Any]:
    """Calls `body` while `cond` is true, and returns the loop variables.

    Both take the loop variables, which may be lists and dicts and are overwritten. `cond` returns
    bool[1], `body` the next values: as many, of the same shapes. `is_test` has no effect.

    Raises:
        ProgramError: the result of the body does not match the loop variables.
    """
    for function, what in ((cond, "cond"), (body, "body")):
        if not callable(function):
            raise mistake(f"while_loop: '{what}' is not a function", kind=WrongTypeError)
    check_type(loop_vars, "'loop_vars' of while_loop", (list, tuple))
    if not loop_vars:
        raise mistake("while_loop: 'loop_vars' is empty", "give it at least one variable")
    go_on = cond(*loop_vars)
    loop = While(go_on, is_test, name)
    with loop.block():
        made = body(*loop_vars)
        made = list(made) if isinstance(made, list | tuple) else [made]
        new, old = flattened("while_loop", made), flattened("while_loop", list(loop_vars))
        if new.form != old.form:
            raise mistake("while_loop: 'body' returns other variables than 'loop_vars'")
        again = cond(*made)
        _assign_all(new.leaves, old.leaves)
        assign(again, go_on)
    return loop_vars


def _assign_all(new: Sequence[Variable], old: Sequence[Variable]) -> None:
    """Assigns variables simultaneously: two may swap."""
    pairs = [(x, to) for x, to in zip(new, old, strict=True) if x is not to]
    arrays = [to.name for _, to in pairs if to.type == VarType.LOD_TENSOR_ARRAY]
    if arrays:
        raise mistake(f"while_loop: 'body' returns another array than '{arrays[0]}'")
    kept = [(assign(x) if any(x is one for one in old) else x, to) for x, to in pairs]
    for x, to in kept:
        if x.sizes != to.sizes:
            what = f"'{to.name}' is {list(to.sizes or ())}, and becomes {list(x.sizes or ())}"
            raise mistake(f"while_loop: {what}", "a variable of a loop keeps its shape")
        assign(x, to)


@dataclass
class _Memory:
    """A state: its initial value, the name the block reads, and its next value."""

    init: Variable
    before: Variable
    after: Variable | None = None


@dataclass
class StepBlock:
    """A block for one step, during and after its construction."""

    layer: str  # name of the layer in messages, such as `StaticRNN`
    op_type: str  # of the operator that runs the block
    helper: LayerHelper  # adds operators
    # iterated variables, with the block's name of one step
    inputs: list[tuple[Variable, Variable]] = field(default_factory=list)
    memories: dict[str, _Memory] = field(default_factory=dict)  # states, by the block's names
    # kept variables of the block, with the stacked result of all steps
    outputs: list[tuple[Variable, Variable]] = field(default_factory=list)
    block: Block | None = None
    is_open: bool = False

    @contextmanager
    def building(self) -> Iterator[None]:
        """Opens the block; afterwards adds the operator that runs it.

        Raises:
            ProgramError: nothing is iterated over, a memory is never updated, or the capacity of an
                array of the block is unknown.
        """
        if self.block is not None:
            raise mistake(f"{self.layer}: it has its block already", "make another for another")
        program = self.helper.main_program
        self.block, self.is_open = program._create_block(), True
        with open_loop(program, self.block):
            try:
                yield
            finally:
                self.is_open = False
                program._rollback()
        self._append()

    def check_open(self, what: str) -> Block:
        """The block, which must be open."""
        if self.block is None or not self.is_open:
            raise mistake(f"{self.layer}: {what} is called outside its block")
        return self.block

    def outer(self) -> Block:
        assert self.block is not None
        return self.block.program.block(self.block.parent_idx)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inserts operators before the block that is being built."""
        assert self.block is not None
        program = self.block.program
        program.current_block_idx = self.block.parent_idx
        try:
            yield
        finally:
            program.current_block_idx = self.block.idx

    def declare(self, like: Variable, sizes: tuple[Size, ...], kind: str) -> Variable:
        made = self.check_open(kind).create_var(
            name=like.block.program.unique_name(f"{self.helper.name}.{kind}"),
            dtype=like.dtype,
            stop_gradient=like.stop_gradient,
        )
        made.sizes = sizes
        return made

    def check_outside(self, x: Variable, what: str) -> None:
        """Checks that a variable is computed outside the block."""
        if self.block is not None and self.block.vars.get(x.name) is x:
            message = f"{self.layer}: its block makes '{x.name}', {what}"
            raise mistake(message, "make it before the block")

    def remember(self, init: Variable) -> Variable:
        """Adds a memory; returns the block's variable of it."""
        self.check_outside(init, "with which a memory begins")
        assert init.sizes is not None
        before = self.declare(init, init.sizes, "mem")
        before.stop_gradient = False
        self.memories[before.name] = _Memory(init, before)
        return before

    def update(self, before: Any, after: Any) -> None:
        """Sets a memory's next value, which must have its shape."""
        self.check_open("update_memory")
        for one in (before, after):
            check_type(one, f"what {self.layer}.update_memory takes", Variable)
        memory = self.memories.get(before.name)
        if memory is None:
            raise mistake(f"{self.layer}: '{before.name}' is not a memory", "rnn.memory(...)")
        if after.sizes != before.sizes:
            what = f"memory '{before.name}' is {list(before.sizes or ())}, and becomes"
            raise mistake(f"{self.layer}: {what} {list(after.sizes or ())}")
        memory.after = self._own(after)

    def keep(self, of: Any, sizes: tuple[Size, ...], lod_level: int = 0) -> None:
        """Adds an output of every step."""
        self.check_open("an output")
        check_type(of, f"an output of {self.layer}", Variable)
        outer = self.outer()
        name = outer.program.unique_name(f"{self.helper.name}.out")
        made = outer.create_var(name=name, dtype=of.dtype)
        made.sizes, made.lod_level = sizes, lod_level
        self.outputs.append((self._own(of), made))

    def _own(self, x: Variable) -> Variable:
        """The block's own variable for one of an enclosing block."""
        return x if self.block is not None and self.block.has_var(x.name) else assign(x)

    def results(self) -> Any:
        """The outputs of the finished block; a single one by itself."""
        if self.block is None or self.is_open:
            raise mistake(f"{self.layer}: its outputs are asked for before its block is finished")
        if not self.outputs:
            raise mistake(f"{self.layer}: it has no output", "call output(...) in its block")
        made = [out for _, out in self.outputs]
        return made[0] if len(made) == 1 else made

    def _append(self) -> None:
        assert self.block is not None
        if not self.inputs:
            raise mistake(f"{self.layer}: it goes through nothing", "call step_input(x) first")
        for memory in self.memories.values():
            if memory.after is None:
                what = f"memory '{memory.before.name}' is never updated"
                raise mistake(f"{self.layer}: {what}", "call update_memory(before, after)")
        read, written = captured_names(self.block)
        if written:
            what = f"its block writes '{written[0]}', which is around it"
            raise mistake(f"{self.layer}: {what}", "what a step leaves to the next is a memory")
        states = list(self.memories.values())
        attrs = {
            "sub_block": self.block,
            "step_inputs": [inner.name for _, inner in self.inputs],
            "ex_states": [memory.before.name for memory in states],
            "states": [memory.after.name for memory in states if memory.after is not None],
            "step_outputs": [inner.name for inner, _ in self.outputs],
        }
        inputs = {
            "inputs": [x.name for x, _ in self.inputs],
            "initial_states": [memory.init.name for memory in states],
            "parameters": read,
        }
        outputs = {"outputs": [out.name for _, out in self.outputs]}
        op = self.outer().append_op(self.op_type, inputs, outputs, attrs)
        if not self.block.program._open_loops:
            room_in_loop(op)

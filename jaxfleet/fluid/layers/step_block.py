"""The block for one time step, with its memories, shared by `StaticRNN` and `DynamicRNN`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.control_flow import captured_names
from jaxfleet.fluid.layers.loops import open_loop
from jaxfleet.fluid.layers.tensor import assign
from jaxfleet.fluid.layers.tensor_arrays import room_in_loop
from jaxfleet.ir import Size


@dataclass
class _Memory:
    """A state: its initial value, the name the block reads, and its next value."""

    init: Variable
    before: Variable
    after: Variable | None = None


@dataclass
class StepBlock:
    """A block for one step, during and after its construction.

    Attributes:
        layer: name of the layer in messages, such as `StaticRNN`.
        op_type: of the operator that runs the block.
        helper: adds operators.
        inputs: iterated variables, with the block's name of one step.
        memories: states, by the block's names.
        outputs: kept variables of the block, with the stacked result of all steps.
    """

    layer: str
    op_type: str
    helper: LayerHelper
    inputs: list[tuple[Variable, Variable]] = field(default_factory=list)
    memories: dict[str, _Memory] = field(default_factory=dict)
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

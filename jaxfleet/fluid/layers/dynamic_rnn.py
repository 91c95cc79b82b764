"""`DynamicRNN`: a block that runs for each step of sequences of unequal lengths."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.dtypes import dtype_name
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.sequences import sequences
from jaxfleet.fluid.layers.stepping import Stepping
from jaxfleet.fluid.ragged import join_rows
from jaxfleet.fluid.variable import Variable
from jaxfleet.ir.dims import letter


class DynamicRNN:
    """Runs a block for each step of sequences, all of them at once: `[b, ...]`.

    A sequence that has ended keeps its state, and what the block makes of it is dropped.

    ::

        rnn = layers.DynamicRNN()
        with rnn.block():
            word = rnn.step_input(words)  # f32[rows,d], and word f32[b,d]
            before = rnn.memory(shape=[8])
            hidden = layers.fc([word, before], 8, act="tanh")
            rnn.update_memory(before, hidden)
            rnn.output(hidden)
        last = layers.sequence_last_step(rnn())

    Args:
        name: of the layer.
    """

    BEFORE_RNN, IN_RNN, AFTER_RNN = 0, 1, 2

    def __init__(self, name: str | None = None) -> None:
        helper = LayerHelper("dynamic_rnn", name)
        self._steps = Stepping("DynamicRNN", "dynamic_recurrent", helper)

    def block(self) -> AbstractContextManager[None]:
        """Adds the operators of a `with` to the block."""
        return self._steps.building()

    def step_input(self, x: Variable, level: int = 0) -> Variable:
        """Goes through sequences; returns one row of each in the block: `[b, ...]`.

        Args:
            x: sequences, `[rows, ...]`; all inputs have equal lengths.
            level: 0, since sequences have one level.

        Raises:
            ProgramError: called outside the block, the input has no sequences or is made by the
                block, or another level is asked for.
        """
        self._steps.check_open("step_input")
        (given,) = sequences("DynamicRNN", "x", x)
        self._steps.check_outside(given, "which it is to go through")
        if level != 0:
            raise mistake(f"DynamicRNN: level {level} of sequences that have one", "level=0")
        if self._steps.inputs:
            join_rows(given.block.program, [self._steps.inputs[0][0], given])
        assert given.sizes is not None
        made = self._steps.declare(given, (letter("b"), *given.sizes[1:]), "step")
        self._steps.inputs.append((given, made))
        return made

    def static_input(self, x: Variable) -> Variable:
        """Lets the block read a variable whole in every step, rows or sequences.

        Raises:
            WrongTypeError: it is not a variable.
            ProgramError: called outside the block, or before `step_input`.
        """
        self._steps.check_open("static_input")
        check_type(x, "the static input of DynamicRNN", Variable)
        if not self._steps.inputs:
            raise mistake("DynamicRNN: static_input comes behind step_input")
        return x

    def memory(
        self,
        init: Variable | None = None,
        shape: Sequence[int] | None = None,
        value: float = 0.0,
        need_reorder: bool = False,
        dtype: Any = "float32",
    ) -> Variable:
        """Adds a state; returns what the step before left of it: `[b, ...]`.

        Args:
            init: what the first step finds, `[b, ...]`; else `shape` and `value` say.
            shape: without the batch.
            value: what all elements begin with.
            need_reorder: taken: sequences keep their order here.
            dtype: of the state.

        Raises:
            ProgramError: neither is given, or nothing is gone through yet.
        """
        del need_reorder
        steps = self._steps
        steps.check_open("memory")
        check_type(init, "'init' of a memory", (Variable, type(None)))
        if init is not None:
            return steps.remember(init)
        if shape is None:
            raise mistake("DynamicRNN: a memory begins with nothing", "give init= or shape=")
        if not steps.inputs:
            raise mistake("DynamicRNN: a memory comes behind step_input, whose batch it has")
        name = dtype_name(dtype)
        with steps.outside():
            begun = steps.helper.output(name)
            begun.sizes = (letter("b"), *shape)
            attrs = {"shape": list(shape), "value": float(value), "dtype": name}
            slots = {"X": steps.inputs[0][0]}, {"Out": begun}
            steps.helper.append_op("fill_constant_per_sequence", *slots, attrs)
        return steps.remember(begun)

    def update_memory(self, ex_mem: Variable, new_mem: Variable) -> None:
        """Sets what a state becomes after the step.

        Raises:
            WrongTypeError: one of them is not a variable.
            ProgramError: `ex_mem` is not a memory, or `new_mem` has another shape.
        """
        self._steps.update(ex_mem, new_mem)

    def output(self, *outputs: Variable) -> None:
        """Keeps variables of every step, `[b, ...]`, as sequences like the inputs', `[rows, ...]`.

        Raises:
            WrongTypeError: one is not a variable.
            ProgramError: called outside the block, or before `step_input`.
        """
        self._steps.check_open("output")
        if not self._steps.inputs:
            raise mistake("DynamicRNN: it goes through nothing", "call step_input(x) first")
        whole = self._steps.inputs[0][0]
        for one in outputs:
            check_type(one, "an output of DynamicRNN", Variable)
            sizes = (whole.sizes or ())[:1] + (one.sizes or ())[1:]
            self._steps.keep(one, sizes, whole.lod_level)

    def __call__(self) -> Any:
        """Returns what was kept: sequences."""
        return self._steps.results()

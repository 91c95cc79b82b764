"""`StaticRNN` over equal and `DynamicRNN` over unequal lengths: one block per time step."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.sequence_lengths import join_rows
from jaxfleet.fluid.framework.types import dtype_name
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.loops import StepBlock
from jaxfleet.fluid.layers.sequences import sequences
from jaxfleet.fluid.layers.tensor import fill_constant_batch_size_like
from jaxfleet.ir.dims import letter


class StaticRNN:
    """Runs a block for each step of sequences of equal lengths, `[steps, b, ...]`.

    ::

        rnn = layers.StaticRNN()
        with rnn.step():
            word = rnn.step_input(x)  # f32[steps,b,d], and word f32[b,d]
            before = rnn.memory(shape=[-1, 8], batch_ref=word)
            hidden = layers.fc([word, before], 8, act="tanh")
            rnn.update_memory(before, hidden)
            rnn.step_output(hidden)
        hidden = rnn()  # f32[steps,b,8]
    `name` is that of the layer.
    """

    def __init__(self, name: str | None = None) -> None:
        self._steps = StepBlock("StaticRNN", "recurrent", LayerHelper("static_rnn", name))

    def step(self) -> AbstractContextManager[None]:
        return self._steps.building()

    def step_input(self, x: Variable) -> Variable:
        """Iterates over a variable `[steps, b, ...]`; returns one step of it in the block.

        Raises:
            ProgramError: called outside the block, or the input has no axis, has another number of
                steps than the others or is computed by the block.
        """
        self._steps.check_open("step_input")
        check_type(x, "the input of StaticRNN", Variable)
        if not x.sizes:
            raise mistake(f"StaticRNN: '{x.name}' has no axis to go through")
        self._steps.check_outside(x, "which it is to go through")
        first = self._steps.inputs[0][0] if self._steps.inputs else x
        assert first.sizes is not None
        if first.sizes[0] != x.sizes[0]:
            what = f"'{first.name}' has {first.sizes[0]} steps, and '{x.name}' {x.sizes[0]}"
            raise mistake(f"StaticRNN: {what}")
        made = self._steps.declare(x, x.sizes[1:], "step")
        self._steps.inputs.append((x, made))
        return made

    def memory(
        self,
        init: Variable | None = None,
        shape: Sequence[int] | None = None,
        batch_ref: Variable | None = None,
        init_value: float = 0.0,
        init_batch_dim_idx: int = 0,
        ref_batch_dim_idx: int = 1,
    ) -> Variable:
        """Adds a state; returns its value of the step before.

        Args:
            init: value at the first step; otherwise made from `shape` and `batch_ref`.
            shape: -1 for the batch.
            batch_ref: has the batch: an input, or one step of it.
            init_value: of all elements.
            init_batch_dim_idx: axis of the batch in `shape`.
            ref_batch_dim_idx: axis of the batch in the input.

        Raises:
            ProgramError: neither is given.
        """
        steps = self._steps
        steps.check_open("memory")
        check_type(init, "'init' of a memory", (Variable, type(None)))
        if init is not None:
            return steps.remember(init)
        if shape is None or batch_ref is None:
            what = "a memory begins with nothing"
            raise mistake(f"StaticRNN: {what}", "give init=, or shape= and batch_ref=")
        whole = {inner.name: x for x, inner in steps.inputs}
        like = whole.get(batch_ref.name, batch_ref)
        sizes = [max(size, 1) for size in shape]
        with steps.outside():
            begun = fill_constant_batch_size_like(
                like, sizes, like.dtype, init_value, ref_batch_dim_idx, init_batch_dim_idx
            )
        return steps.remember(begun)

    def update_memory(self, mem: Variable, var: Variable) -> None:
        """Sets the value of a memory for the next step; its shape must not change."""
        self._steps.update(mem, var)

    def step_output(self, o: Variable) -> None:
        """Keeps a variable of every step: `[...]` becomes `[steps, ...]`.

        Raises:
            WrongTypeError: the output is not a variable.
            ProgramError: called outside the block, or before `step_input`.
        """
        if not self._steps.inputs:
            raise mistake("StaticRNN: it goes through nothing", "call step_input(x) first")
        count = self._steps.inputs[0][0].sizes
        check_type(o, "an output of StaticRNN", Variable)
        self._steps.keep(o, ((count or ())[0], *(o.sizes or ())))

    def output(self, *outputs: Variable) -> None:
        """Keeps several variables of every step, see `step_output`."""
        for one in outputs:
            self.step_output(one)

    def __call__(self) -> Any:
        """The kept outputs, `[steps, ...]` each."""
        return self._steps.results()


class DynamicRNN:
    """Runs a block for each step of sequences, all of them at once: `[b, ...]`.

    A sequence that has ended keeps its state, and further outputs of it are dropped.

    ::

        rnn = layers.DynamicRNN()
        with rnn.block():
            word = rnn.step_input(words)  # f32[rows,d], and word f32[b,d]
            before = rnn.memory(shape=[8])
            hidden = layers.fc([word, before], 8, act="tanh")
            rnn.update_memory(before, hidden)
            rnn.output(hidden)
        last = layers.sequence_last_step(rnn())
    `name` is that of the layer.
    """

    BEFORE_RNN, IN_RNN, AFTER_RNN = 0, 1, 2

    def __init__(self, name: str | None = None) -> None:
        helper = LayerHelper("dynamic_rnn", name)
        self._steps = StepBlock("DynamicRNN", "dynamic_recurrent", helper)

    def block(self) -> AbstractContextManager[None]:
        return self._steps.building()

    def step_input(self, x: Variable, level: int = 0) -> Variable:
        """Iterates over sequences `[rows, ...]`; returns one row of each in the block: `[b, ...]`.

        All inputs have equal lengths; `level` must be 0.

        Raises:
            ProgramError: called outside the block, the input has no sequences or is computed by the
                block, or another level is requested.
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
        """Makes a whole variable, rows or sequences, readable in every step.

        Raises:
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
        """Adds a state; returns its value of the step before: `[b, ...]`.

        Args:
            init: value at the first step, `[b, ...]`; otherwise made from `shape` and `value`.
            shape: without the batch.
            value: of all elements.
            need_reorder: no effect: sequences keep their order here.
            dtype: of the state.

        Raises:
            ProgramError: neither is given, or `step_input` was not called.
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
        """Sets the value of a memory for the next step; its shape must not change."""
        self._steps.update(ex_mem, new_mem)

    def output(self, *outputs: Variable) -> None:
        """Keeps variables of every step, `[b, ...]`, as sequences like the inputs', `[rows, ...]`.

        Raises:
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
        """The kept outputs, as sequences."""
        return self._steps.results()

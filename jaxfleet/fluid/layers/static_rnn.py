"""`StaticRNN`: a block that runs for each element of its inputs' first axis."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.stepping import Stepping
from jaxfleet.fluid.layers.tensors import fill_constant_batch_size_like
from jaxfleet.fluid.variable import Variable


class StaticRNN:
    """Runs a block for each step of sequences that have equal lengths, `[steps, b, ...]`.

    ::

        rnn = layers.StaticRNN()
        with rnn.step():
            word = rnn.step_input(x)  # f32[steps,b,d], and word f32[b,d]
            before = rnn.memory(shape=[-1, 8], batch_ref=word)
            hidden = layers.fc([word, before], 8, act="tanh")
            rnn.update_memory(before, hidden)
            rnn.step_output(hidden)
        hidden = rnn()  # f32[steps,b,8]

    Args:
        name: of the layer.
    """

    def __init__(self, name: str | None = None) -> None:
        self._steps = Stepping("StaticRNN", "recurrent", LayerHelper("static_rnn", name))

    def step(self) -> AbstractContextManager[None]:
        """Adds the operators of a `with` to the block."""
        return self._steps.building()

    def step_input(self, x: Variable) -> Variable:
        """Goes through a variable; returns one step of it in the block.

        Args:
            x: `[steps, b, ...]`; all inputs have the same number of steps.

        Raises:
            WrongTypeError: it is not a variable.
            ProgramError: called outside the block, or the input has no axis, has another number of
                steps or is made by the block.
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
        """Adds a state; returns what the step before left of it.

        Args:
            init: the value at the first step; unless given, `shape` and `batch_ref` make it.
            shape: -1 for the batch.
            batch_ref: has the batch: an input, or one step of it.
            init_value: what all elements begin with.
            init_batch_dim_idx: the axis of the batch in `shape`.
            ref_batch_dim_idx: and in the input.

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
        """Sets what a state becomes after the step.

        Raises:
            WrongTypeError: one of them is not a variable.
            ProgramError: `mem` is not a memory, or `var` has another shape.
        """
        self._steps.update(mem, var)

    def step_output(self, o: Variable) -> None:
        """Keeps a variable of every step: `[...]` becomes `[steps, ...]`.

        Raises:
            WrongTypeError: it is not a variable.
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
        """Returns what was kept, `[steps, ...]` each."""
        return self._steps.results()

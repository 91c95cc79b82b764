"""Optimizer: `minimize` adds gradients, clipping, regularization, and one update per parameter."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxfleet.fluid import unique_name
from jaxfleet.fluid.argument_checks import check_type, mistake, number
from jaxfleet.fluid.backward import append_backward
from jaxfleet.fluid.clip import GradientClipBase, append_gradient_clip_ops, error_clip_callback
from jaxfleet.fluid.distribute_lookup_table import find_distributed_lookup_table
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.differentiation import Callback
from jaxfleet.fluid.framework.guards import name_scope
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import (
    Program,
    default_main_program,
    default_startup_program,
    program_guard,
)
from jaxfleet.fluid.framework.variable import Pairs, Parameter, Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.regularizer import WeightDecayRegularizer, append_regularization_ops


@dataclass(frozen=True)
class Accumulator:
    """Optimizer state of each parameter."""

    name: str  # suffix of its name: with `moment1`, `fc_w_moment1_0` is that of `fc_w`
    slot: str  # input of the operator, which writes `slot` + `Out`
    value: float = 0.0  # initial value
    is_scalar: bool = False  # `[1]` instead of the parameter's shape
    out: str = ""  # name of the output slot, if it differs
    is_read_only: bool = False  # the operator does not write it


class Optimizer:
    """Base class of optimizers.

    Args:
        learning_rate: a number, or a variable of a schedule.
        parameter_list: parameters to train; all unless given.
        regularization: of parameters without their own.
        grad_clip: clipping of gradients.
        name: of the optimizer; its state is then named `fc_w_<name>_moment1_0`.
    """

    op_type: ClassVar[str] = ""
    reads_rate: ClassVar[bool] = True
    accumulators: tuple[Accumulator, ...] = ()

    def __init__(
        self,
        learning_rate: float | Variable,
        parameter_list: Sequence[Parameter] | None = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        check_type(learning_rate, "a learning rate", (float, int, Variable))
        check_type(grad_clip, "grad_clip", (GradientClipBase, type(None)))
        check_type(regularization, "regularization", (WeightDecayRegularizer, type(None)))
        check_type(parameter_list, "parameter_list", (list, tuple, type(None)))
        self._rate, self._parameters = learning_rate, parameter_list
        self.regularization, self._grad_clip, self._name = regularization, grad_clip, name
        self._attrs: Mapping[str, Any] = {}  # of the update operator
        self._rates: dict[int, Variable] = {}
        self._state: dict[tuple[str, str], Variable] = {}

    def minimize(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[Parameter | str] | None = None,
        no_grad_set: Collection[str | Variable] | None = None,
    ) -> tuple[list[Operator], Pairs]:
        """Adds training to a program; returns the updates, and (parameter, gradient) pairs.

        Args:
            loss: `[1]`.
            startup_program: initializes the state; the default startup program unless given.
            parameter_list: parameters to train; the optimizer's unless given.
            no_grad_set: variables at which gradients stop.

        Raises:
            TypeError: an argument is of another type.
            ProgramError: the loss has another shape, or depends on no parameter.
        """
        pairs = self.backward(loss, startup_program, parameter_list, no_grad_set)
        return self.apply_optimize(loss, startup_program, pairs), pairs

    def backward(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[Parameter | str] | None = None,
        no_grad_set: Collection[str | Variable] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> Pairs:
        """Adds the gradients, and returns them with their parameters.

        Arguments are those of `minimize`; `callbacks` are called after each operator, as is the one
        that clips errors.
        """
        check_type(startup_program, "startup_program", (Program, type(None)))
        check_type(callbacks, "callbacks", (list, tuple, type(None)))
        for name, value in self._attrs.items():
            number(value, f"'{name}' of {type(self).__name__}")
        wanted = parameter_list if parameter_list is not None else self._parameters
        called = [*(callbacks or ()), error_clip_callback]
        return append_backward(loss, wanted, no_grad_set, called)

    def apply_optimize(
        self, loss: Variable, startup_program: Program | None, params_grads: Pairs
    ) -> list[Operator]:
        """Adds the updates to the program of a loss; returns them."""
        startup = startup_program or default_startup_program()
        with program_guard(loss.block.program, startup):
            return self.apply_gradients(params_grads)

    def apply_gradients(self, params_grads: Pairs) -> list[Operator]:
        """Adds clipping, regularization and the updates, parameters by name; returns the updates.

        Raises:
            ProgramError: no parameter has a gradient.
        """
        pairs = sorted((pair for pair in params_grads if pair[1] is not None), key=_name)
        if not pairs:
            hint = "are parameters trainable, and is the loss made of them?"
            raise mistake("the loss depends on no parameter that may be trained", hint)
        block = pairs[0][0].block.program.global_block()
        pairs, of_table = self._without_table(block, pairs)
        if self._grad_clip is not None:
            pairs = self._grad_clip(pairs)
        else:
            pairs = append_gradient_clip_ops(pairs)
        pairs = append_regularization_ops(pairs, self.regularization)
        return [*self._updates(block, pairs), *of_table]

    def _updates(self, block: Block, pairs: Pairs) -> list[Operator]:
        start = len(block.ops)
        for param, _ in pairs:
            self._make_state(param)
        self._make_rate(block)
        for param, grad in pairs:
            with block.program._optimized_guard([param, grad]), name_scope("optimizer"):
                self._update(block, param, grad)
        self._finish(block, pairs)
        return block._slice_ops(start, len(block.ops))

    def _without_table(self, block: Block, pairs: Pairs) -> tuple[Pairs, list[Operator]]:
        """Adds the update of the distributed table: plain `sgd`, whatever the optimizer."""
        table = find_distributed_lookup_table(block.program)
        found = next(((param, grad) for param, grad in pairs if param.name == table), None)
        if found is None:
            return pairs, []
        param, grad = found
        with block.program._optimized_guard(found), name_scope("optimizer"):
            self._make_rate(block)
            inputs = {"Param": param, "Grad": grad, "LearningRate": self._rate_of(block, param)}
            update = block.append_op("sgd", inputs, {"ParamOut": param})
        return [pair for pair in pairs if pair[0] is not param], [update]

    def attributes_of(self, param: Parameter, grad: Variable) -> Mapping[str, Any]:
        """Attributes of the operator that updates a parameter by a gradient."""
        del param, grad
        return self._attrs

    def _more_inputs(self) -> Mapping[str, Variable]:
        """Inputs of the updates by slot, besides parameters, gradients, rates and state."""
        return {}

    def _finish(self, block: Block, pairs: Pairs) -> None:
        """Hook after all updates."""

    def _make_rate(self, block: Block) -> None:
        if isinstance(self._rate, Variable) or id(block.program) in self._rates:
            return
        name = unique_name.generate("learning_rate")
        rate = LayerHelper.named(name).global_variable(name, [1], "float32", float(self._rate))
        self._rates[id(block.program)] = rate

    def _global_learning_rate(self, program: Program | None = None) -> Variable | None:
        """The learning rate variable; None before it is created."""
        if isinstance(self._rate, Variable):
            return self._rate
        return self._rates.get(id(program or default_main_program()))

    def _rate_of(self, block: Block, param: Parameter) -> Variable:
        factor = param.optimize_attr["learning_rate"]
        if isinstance(factor, Variable):
            return factor
        rate = self._global_learning_rate(block.program)
        assert rate is not None
        if factor == 1.0:
            return rate
        with block.program._lr_schedule_guard(is_with_opt=True), name_scope("scale_with_param_lr"):
            out = block.create_var(name=unique_name.generate("tmp"), dtype=rate.dtype)
            block.append_op("scale", {"X": rate}, {"Out": out}, {"scale": float(factor)})
        return out

    def _make_state(self, param: Parameter) -> None:
        for one in self.accumulators:
            own = one.name if self._name is None else f"{self._name}_{one.name}"
            name = unique_name.generate(f"{param.name}_{own}")
            shape = [1] if one.is_scalar else list(param.shape)
            helper = LayerHelper.named(name)
            made = helper.global_variable(name, shape, param.dtype, one.value)
            self._state[param.name, one.name] = made

    def _update(self, block: Block, param: Parameter, grad: Variable) -> Operator:
        state = {one: self._state[param.name, one.name] for one in self.accumulators}
        inputs: dict[str, Any] = {"Param": param, "Grad": grad, **self._more_inputs()}
        if self.reads_rate:
            inputs["LearningRate"] = self._rate_of(block, param)
        outputs: dict[str, Any] = {"ParamOut": param}
        for one, variable in state.items():
            inputs[one.slot] = variable
            if not one.is_read_only:
                outputs[one.out or f"{one.slot}Out"] = variable
        return block.append_op(self.op_type, inputs, outputs, self.attributes_of(param, grad))


def _name(pair: tuple[Parameter, Variable]) -> str:
    return pair[0].name

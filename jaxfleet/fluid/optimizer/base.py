"""Optimizer: `minimize` adds gradients, clipping, regularization, and an update a parameter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxfleet.errors import ProgramError
from jaxfleet.fluid import unique_name
from jaxfleet.fluid.backward import append_backward
from jaxfleet.fluid.block import Block
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.program import default_startup_program, program_guard
from jaxfleet.fluid.regularizer import append_regularization_ops
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.variable import Parameter, Variable

Pairs = list[tuple[Parameter, Variable]]


@dataclass(frozen=True)
class Accumulator:
    """State that an optimizer keeps for each parameter.

    Attributes:
        name: what it is called: `moment1`, so that a parameter's is `fc_w_moment1_0`.
        slot: of the operator that reads it; it writes `slot` + `Out`.
        value: what it begins with.
        is_scalar: `[1]` instead of the parameter's shape.
        out: the slot that is written, where it is called otherwise.
        is_read_only: the operator does not write it.
    """

    name: str
    slot: str
    value: float = 0.0
    is_scalar: bool = False
    out: str = ""
    is_read_only: bool = False


class Optimizer:
    """What all optimizers do.

    Args:
        learning_rate: a number, or a variable that a schedule made.
        parameter_list: which parameters are trained; all unless given.
        regularization: of parameters that have none of their own.
        grad_clip: how gradients are clipped.
        name: of the optimizer.
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
        if not isinstance(learning_rate, float | int | Variable):
            what = f"a learning rate is a number or a Variable, not {learning_rate!r}"
            raise ProgramError(what)
        self._rate, self._parameters = learning_rate, parameter_list
        self.regularization, self._grad_clip, self._name = regularization, grad_clip, name
        self._attrs: Mapping[str, Any] = {}  # of the operator that updates
        self._rates: dict[int, Variable] = {}
        self._state: dict[tuple[str, str], Variable] = {}

    def minimize(
        self,
        loss: Variable,
        startup_program: Any = None,
        parameter_list: Sequence[Parameter | str] | None = None,
        no_grad_set: set[str | Variable] | None = None,
    ) -> tuple[list[Operator], Pairs]:
        """Adds what trains the program; returns the updates, and parameters with gradients."""
        pairs = self.backward(loss, startup_program, parameter_list, no_grad_set)
        startup = startup_program or default_startup_program()
        with program_guard(loss.block.program, startup):
            return self.apply_gradients(pairs), pairs

    def backward(
        self,
        loss: Variable,
        startup_program: Any = None,
        parameter_list: Sequence[Parameter | str] | None = None,
        no_grad_set: set[str | Variable] | None = None,
        callbacks: Any = None,
    ) -> Pairs:
        """Adds the gradients, and returns them with their parameters."""
        del startup_program
        wanted = parameter_list if parameter_list is not None else self._parameters
        return append_backward(loss, wanted, no_grad_set, callbacks)

    def apply_gradients(self, params_grads: Pairs) -> list[Operator]:
        """Adds clipping, regularization and the updates, parameters by name."""
        pairs = sorted(params_grads, key=lambda pair: pair[0].name)
        if not pairs:
            raise ProgramError("the loss depends on no parameter that may be trained")
        if self._grad_clip is not None:
            pairs = self._grad_clip(pairs)
        pairs = append_regularization_ops(pairs, self.regularization)
        block = pairs[0][0].block.program.global_block()
        for param, _ in pairs:
            self._make_state(param)
        self._make_rate(block)
        ops = []
        for param, grad in pairs:
            with block.program.role(OpRole.OPTIMIZE, [param.name, grad.name]):
                ops.append(self._update(block, param, grad))
        self._finish(block, pairs)
        return ops

    def attributes_of(self, param: Parameter) -> Mapping[str, Any]:
        """Returns the attributes of the operator that updates a parameter."""
        del param
        return self._attrs

    def _finish(self, block: Block, pairs: Pairs) -> None:
        """Adds what comes after all updates."""

    def _make_rate(self, block: Block) -> None:
        if isinstance(self._rate, Variable) or id(block.program) in self._rates:
            return
        name = unique_name.generate("learning_rate")
        rate = LayerHelper.named(name).global_variable(name, [1], "float32", float(self._rate))
        self._rates[id(block.program)] = rate

    def _rate_of(self, block: Block, param: Parameter) -> Variable:
        rate = self._rate if isinstance(self._rate, Variable) else self._rates[id(block.program)]
        factor = param.optimize_attr["learning_rate"]
        if factor == 1.0:
            return rate
        with block.program.role(OpRole.OPTIMIZE | OpRole.LR_SCHED):
            out = block.create_var(dtype=rate.dtype)
            block.append_op("scale", {"X": rate}, {"Out": out}, {"scale": float(factor)})
        return out

    def _make_state(self, param: Parameter) -> None:
        for one in self.accumulators:
            name = unique_name.generate(f"{param.name}_{one.name}")
            shape = [1] if one.is_scalar else list(param.shape)
            helper = LayerHelper.named(name)
            made = helper.global_variable(name, shape, param.dtype, one.value)
            self._state[param.name, one.name] = made

    def _update(self, block: Block, param: Parameter, grad: Variable) -> Operator:
        state = {one: self._state[param.name, one.name] for one in self.accumulators}
        inputs: dict[str, Any] = {"Param": param, "Grad": grad}
        if self.reads_rate:
            inputs["LearningRate"] = self._rate_of(block, param)
        outputs: dict[str, Any] = {"ParamOut": param}
        for one, variable in state.items():
            inputs[one.slot] = variable
            if not one.is_read_only:
                outputs[one.out or f"{one.slot}Out"] = variable
        return block.append_op(self.op_type, inputs, outputs, self.attributes_of(param))

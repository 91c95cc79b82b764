"""DGCMomentumOptimizer: momentum with deep gradient compression."""

from collections.abc import Sequence
from math import prod
from typing import Any

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.clip import GradientClipByNorm, append_gradient_clip_ops
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.variable import Pairs, Parameter, Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.control_flow import autoincreased_step_counter
from jaxfleet.fluid.optimizer.rules import MomentumOptimizer
from jaxfleet.fluid.regularizer import append_regularization_ops

_COUNTER = "__g_dgc_counter__"
_LEAST = 16384  # minimum number of elements of a compressed parameter, as in fluid


class DGCMomentumOptimizer(MomentumOptimizer):
    """Reduces only the largest elements of each device's accumulated gradients.

    Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression", 2018. Each device accumulates its
    gradients with their momentum; the selected elements are reduced by the collectives of other
    gradients, as an array that is zero elsewhere. So it trains as in the paper, but sends no fewer
    bytes. Parameters of fewer than 16384 elements are trained by plain momentum.

    Args:
        learning_rate: a number, or a variable of a schedule.
        momentum: decay of the velocity.
        rampup_begin_step: first step with compression.
        rampup_step: number of steps over which `sparsity` is stepped through.
        sparsity: shares of a gradient to drop, in order.
        parameter_list: parameters to train; all unless given.
        use_nesterov: Nesterov momentum.
        num_trainers: number of reduced gradients; needed with `grad_clip`.
        regularization: of parameters without their own; added to the reduced sum.
        grad_clip: a `GradientClipByNorm`: each device's own gradients are clipped to its norm
            divided by the root of `num_trainers`.
        name: of the optimizer.

    Raises:
        TypeError: `grad_clip` is of another type, or given without `num_trainers`.
        ValueError: a step or a share is out of range.
    """

    def __init__(
        self,
        learning_rate: float | Variable,
        momentum: float,
        rampup_begin_step: int,
        rampup_step: int = 1,
        sparsity: Sequence[float] = (0.999,),
        parameter_list: Sequence[Parameter] | None = None,
        use_nesterov: bool = False,
        num_trainers: int | None = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            learning_rate, momentum, parameter_list, use_nesterov, regularization, grad_clip, name
        )
        if rampup_begin_step < 0 or rampup_step < 1:
            what = f"rampup_begin_step is {rampup_begin_step}, and rampup_step {rampup_step}"
            raise mistake(what, "they are at least 0 and 1")
        parts = list(sparsity)
        if not parts or not all(0 <= part < 1 for part in parts):
            raise mistake(f"sparsity is {parts}", "each is a part from 0 to below 1, such as 0.999")
        self._local_norm = None if grad_clip is None else _local_norm(grad_clip, num_trainers)
        self._begin, self._step = float(rampup_begin_step), float(rampup_step)
        self._sparsity = parts
        self._counter: Variable | None = None
        self._nesterov, self._momentum = use_nesterov, momentum

    def apply_gradients(self, params_grads: Pairs) -> list[Operator]:
        """Adds compression, clipping, regularization and the updates; returns the updates.

        Raises:
            ProgramError: no parameter has a gradient.
        """
        large = [pair for pair in params_grads if pair[1] is not None and is_large(pair[0])]
        if not large:
            return super().apply_gradients(params_grads)
        self._counter = autoincreased_step_counter(_COUNTER, begin=0)
        for param, grad in sorted(large, key=lambda pair: pair[0].name):
            self._compress(param, grad)
        small = [pair for pair in params_grads if pair[1] is not None and not is_large(pair[0])]
        clip = append_gradient_clip_ops if self._grad_clip is None else self._grad_clip
        pairs = sorted([*large, *(clip(small) if small else [])], key=lambda pair: pair[0].name)
        pairs = append_regularization_ops(pairs, self.regularization)
        return self._updates(pairs[0][0].block.program.global_block(), pairs)

    def _compress(self, param: Parameter, grad: Variable) -> None:
        """Adds, before the reduction, the selection of a gradient's largest elements."""
        block, program = grad.block, grad.block.program
        with program._backward_role_guard():
            program._op_role_var = [param.name, grad.name]
            try:
                step = {"current_step": self._steps}
                if self._local_norm is not None:
                    attrs = {"max_norm": self._local_norm, "rampup_begin_step": self._begin}
                    block.append_op("dgc_clip_by_norm", {"X": grad, **step}, {"Out": grad}, attrs)
                u, v = (self._zeros(param, f"_{kind}") for kind in ("dgc_u", "dgc_v"))
                outputs = {"U_out": u, "V_out": v, "Grad_out": grad}
                block.append_op(
                    "dgc",
                    {"U": u, "V": v, "Grad": grad, **step},
                    outputs,
                    {
                        "m": self._momentum,
                        "use_nesterov": self._nesterov,
                        "sparsity": self._sparsity,
                        "rampup_begin_step": self._begin,
                        "rampup_step": self._step,
                    },
                )
            finally:
                program._op_role_var = []

    @property
    def _steps(self) -> Variable:
        assert self._counter is not None
        return self._counter

    def _zeros(self, param: Parameter, suffix: str) -> Variable:
        name = param.name + suffix
        return LayerHelper.named(name).global_variable(name, list(param.shape), param.dtype, 0.0)

    def _update(self, block: Block, param: Parameter, grad: Variable) -> Operator:
        if not is_large(param):
            return super()._update(block, param, grad)
        velocity = self._state[param.name, "velocity"]
        inputs = {
            "Param": param,
            "Grad": grad,
            "Velocity": velocity,
            "LearningRate": self._rate_of(block, param),
            "current_step": self._steps,
        }
        attrs = {**self.attributes_of(param, grad), "rampup_begin_step": self._begin}
        outputs = {"ParamOut": param, "VelocityOut": velocity}
        return block.append_op("dgc_momentum", inputs, outputs, attrs)


def is_large(param: Parameter) -> bool:
    """Whether the gradient of a parameter is compressed."""
    return param.dtype == "float32" and prod(param.shape) >= _LEAST


def _local_norm(grad_clip: Any, num_trainers: int | None) -> float:
    """The norm to which each device's own gradient is clipped."""
    check_type(grad_clip, "grad_clip of DGCMomentumOptimizer", GradientClipByNorm)
    if not isinstance(num_trainers, int) or num_trainers < 1:
        what = f"num_trainers is {num_trainers!r}, and grad_clip is given"
        raise mistake(what, "over how many devices gradients are summed", WrongTypeError)
    return float(grad_clip.clip_norm * num_trainers**-0.5)

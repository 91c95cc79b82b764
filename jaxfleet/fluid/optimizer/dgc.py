"""DGCMomentumOptimizer: momentum by the largest elements of gradients, the others wait."""

from collections.abc import Sequence
from math import prod
from typing import Any

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.block import Block
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.clip import GradientClipByNorm, append_gradient_clip_ops
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.control_flow import autoincreased_step_counter
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.optimizer.rules import MomentumOptimizer
from jaxfleet.fluid.regularizer import append_regularization_ops
from jaxfleet.fluid.variable import Pairs, Parameter, Variable

_COUNTER = "__g_dgc_counter__"
_LEAST = 16384  # elements of a parameter whose gradient is worth it, as in fluid


class DGCMomentumOptimizer(MomentumOptimizer):
    """Sums over devices or ranks only the largest elements of what each has added up.

    Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression", 2018. Each device adds up its
    gradients with their momentum; elements that are kept are summed over all by the collectives
    of other gradients, as an array that is zero elsewhere. So it trains as the paper does, and
    sends no fewer bytes. Parameters of fewer than 16384 elements are trained by plain momentum.

    Args:
        learning_rate: a number, or a variable that a schedule made.
        momentum: how much of the velocity stays.
        rampup_begin_step: before it, plain momentum.
        rampup_step: over how many steps the parts in `sparsity` are gone through.
        sparsity: the parts of a gradient that are left out, in turn.
        parameter_list: which parameters are trained; all unless given.
        use_nesterov: look ahead.
        num_trainers: over how many gradients are summed; needed with `grad_clip`.
        regularization: of parameters that have none of their own; added to the sum over all.
        grad_clip: a `GradientClipByNorm`: each device's own gradients are clipped to its norm
            divided by the root of `num_trainers`.
        name: of the optimizer.

    Raises:
        TypeError: `grad_clip` is another, or comes without `num_trainers`.
        ValueError: a step or a part is out of range.
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
            ProgramError: there is no parameter with a gradient.
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
        """Adds, before gradients are summed, what leaves the largest elements of one."""
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
        """What counts the runs of the program."""
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
    """True if the gradient of a parameter is compressed."""
    return param.dtype == "float32" and prod(param.shape) >= _LEAST


def _local_norm(grad_clip: Any, num_trainers: int | None) -> float:
    """Returns the norm that each device's own gradient is clipped to."""
    check_type(grad_clip, "grad_clip of DGCMomentumOptimizer", GradientClipByNorm)
    if not isinstance(num_trainers, int) or num_trainers < 1:
        what = f"num_trainers is {num_trainers!r}, and grad_clip is given"
        raise mistake(what, "over how many devices gradients are summed", WrongTypeError)
    return float(grad_clip.clip_norm * num_trainers**-0.5)

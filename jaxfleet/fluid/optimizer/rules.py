"""Update rules: each optimizer declares its operator, its state and its attributes."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from jaxfleet.fluid.argument_checks import number, warn_no_effect
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.operator import OpRole
from jaxfleet.fluid.framework.types import VarType
from jaxfleet.fluid.framework.variable import Pairs, Parameter, Variable
from jaxfleet.fluid.optimizer.base import Accumulator, Optimizer
from jaxfleet.ops.fluid import LAZY_ROWS


class SGDOptimizer(Optimizer):
    """Gradient descent."""

    op_type = "sgd"


class MomentumOptimizer(Optimizer):
    """Descent along a decaying sum of gradients; `momentum` is its decay."""

    op_type = "momentum"
    accumulators = (Accumulator("velocity", "Velocity"),)

    def __init__(
        self,
        learning_rate: float | Variable,
        momentum: float,
        parameter_list: Sequence[Parameter] | None = None,
        use_nesterov: bool = False,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._attrs = {"mu": momentum, "use_nesterov": use_nesterov}


class DpsgdOptimizer(Optimizer):
    """Descent along clipped gradients with noise.

    As the kernel of fluid 1.8.5, it clips the gradient of the whole batch, and draws one number for
    each parameter and step, which all elements share; so it is less private than the algorithm of
    Abadi et al. ("Deep Learning with Differential Privacy", 2016) after which it is named. Draws
    depend on the program's `random_seed` and the parameter's name, equal on all devices.

    Args:
        learning_rate: a number, or a variable of a schedule.
        clip: maximum norm of a gradient.
        batch_size: divisor of the noise.
        sigma: deviation of the noise.
        parameter_list: parameters to train; all unless given.
    """

    op_type = "dpsgd"
    accumulators = (Accumulator("step", "Step", is_scalar=True),)

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        clip: float = 0.9,
        batch_size: float = 0.999,
        sigma: float = 1e-8,
        parameter_list: Sequence[Parameter] | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list)
        self._attrs = {"clip": clip, "batch_size": batch_size, "sigma": sigma}

    def attributes_of(self, param: Parameter, grad: Variable) -> Mapping[str, Any]:
        seed = grad.block.program.random_seed
        own = zlib.crc32(f"{seed}/{param.name}".encode()) >> 1
        return {name: float(value) for name, value in self._attrs.items()} | {"seed": own}


class AdagradOptimizer(Optimizer):
    """Divides by the root of the sum of squared gradients."""

    op_type = "adagrad"

    def __init__(
        self,
        learning_rate: float | Variable,
        epsilon: float = 1e-6,
        parameter_list: Sequence[Parameter] | None = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._attrs = {"epsilon": epsilon}
        self.accumulators = (Accumulator("moment", "Moment", initial_accumulator_value),)


class AdamOptimizer(Optimizer):
    """Divides a decaying average of gradients by the root of one of squares, bias-corrected.

    With `lazy_mode`, rows of an `is_sparse=True` table whose gradient in a step is missing or zero
    keep their value and both averages. `beta1` and `beta2` may be variables of shape `[1]`, read in
    each step; the powers of the bias correction then begin with 0.9 and 0.999, as in fluid.
    """

    op_type = "adam"

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        beta1: float | Variable = 0.9,
        beta2: float | Variable = 0.999,
        epsilon: float = 1e-8,
        parameter_list: Sequence[Parameter] | None = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
        lazy_mode: bool = False,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        betas = {"beta1": beta1, "beta2": beta2}
        fixed = {name: x for name, x in betas.items() if not isinstance(x, Variable)}
        self._attrs = {**fixed, "epsilon": epsilon, "lazy_mode": lazy_mode}
        self._tensors = {
            f"{name.capitalize()}Tensor": x for name, x in betas.items() if isinstance(x, Variable)
        }
        self.accumulators = (
            Accumulator("moment1", "Moment1"),
            Accumulator("moment2", "Moment2"),
            Accumulator("beta1_pow_acc", "Beta1Pow", fixed.get("beta1", 0.9), is_scalar=True),
            Accumulator("beta2_pow_acc", "Beta2Pow", fixed.get("beta2", 0.999), is_scalar=True),
        )

    def attributes_of(self, param: Parameter, grad: Variable) -> Mapping[str, Any]:
        del param
        if self._attrs["lazy_mode"] and grad.type == VarType.SELECTED_ROWS:
            return {**self._attrs, LAZY_ROWS: True}
        return self._attrs

    def _more_inputs(self) -> Mapping[str, Variable]:
        return self._tensors


class RMSPropOptimizer(Optimizer):
    """Divides by the root of a decaying average of squares."""

    op_type = "rmsprop"
    accumulators = (
        Accumulator("momentum", "Moment"),
        Accumulator("mean_square", "MeanSquare"),
        Accumulator("mean_grad", "MeanGrad"),
    )

    def __init__(
        self,
        learning_rate: float | Variable,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        momentum: float = 0.0,
        centered: bool = False,
        parameter_list: Sequence[Parameter] | None = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._attrs = {"decay": rho, "epsilon": epsilon, "momentum": momentum, "centered": centered}


class LarsMomentumOptimizer(Optimizer):
    """Momentum with layerwise rates from the norms of parameters and gradients."""

    op_type = "lars_momentum"
    accumulators = (Accumulator("velocity", "Velocity"),)

    def __init__(
        self,
        learning_rate: float | Variable,
        momentum: float,
        lars_coeff: float = 0.001,
        lars_weight_decay: float = 0.0005,
        parameter_list: Sequence[Parameter] | None = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._attrs = {
            "mu": momentum,
            "lars_coeff": lars_coeff,
            "lars_weight_decay": lars_weight_decay,
        }


class AdamaxOptimizer(Optimizer):
    """Adam with the maximum gradient instead of the second average."""

    op_type = "adamax"

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameter_list: Sequence[Parameter] | None = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._attrs = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon}
        self.accumulators = (
            Accumulator("moment", "Moment"),
            Accumulator("inf_norm", "InfNorm"),
            Accumulator("beta1_pow_acc", "Beta1Pow", beta1, is_scalar=True, is_read_only=True),
        )

    def _finish(self, block: Block, pairs: Pairs) -> None:
        for param, grad in pairs:
            power = self._state[param.name, "beta1_pow_acc"]
            with block.program.role(OpRole.OPTIMIZE, [param.name, grad.name]):
                attrs = {"scale": self._attrs["beta1"]}
                block.append_op("scale", {"X": power}, {"Out": power}, attrs)


class DecayedAdagradOptimizer(Optimizer):
    """Adagrad with a decaying average instead of the sum."""

    op_type = "decayed_adagrad"
    accumulators = (Accumulator("moment", "Moment"),)

    def __init__(
        self,
        learning_rate: float | Variable,
        decay: float = 0.95,
        epsilon: float = 1e-6,
        parameter_list: Sequence[Parameter] | None = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._attrs = {"decay": decay, "epsilon": epsilon}


class AdadeltaOptimizer(Optimizer):
    """Adapts its rate by averages of gradients and updates; `learning_rate` is not read."""

    op_type = "adadelta"
    reads_rate = False
    plain_rate: ClassVar[float] = 1.0  # any other value is warned of
    accumulators = (
        Accumulator("_avg_squared_grad", "AvgSquaredGrad"),
        Accumulator("_avg_squared_update", "AvgSquaredUpdate"),
    )

    def __init__(
        self,
        learning_rate: float | Variable,
        epsilon: float = 1e-6,
        rho: float = 0.95,
        parameter_list: Sequence[Parameter] | None = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._attrs = {"epsilon": epsilon, "rho": rho}
        if isinstance(learning_rate, Variable) or learning_rate not in {1.0, self.plain_rate}:
            reason = "Adadelta finds its own rate, and fluid's operator reads none; give 1.0"
            warn_no_effect("Adadelta's learning_rate", reason)


class FtrlOptimizer(Optimizer):
    """Follows the regularized leader.

    Fluid 1.8.5 passes `l1` to its operator instead of `l2` too. So does this class, for the same
    results as in fluid; an `l2` that differs is warned of.
    """

    op_type = "ftrl"
    accumulators = (
        Accumulator("squared", "SquaredAccumulator", out="SquaredAccumOut"),
        Accumulator("linear", "LinearAccumulator", out="LinearAccumOut"),
    )

    def __init__(
        self,
        learning_rate: float | Variable,
        l1: float = 0.0,
        l2: float = 0.0,
        lr_power: float = -0.5,
        parameter_list: Sequence[Parameter] | None = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._attrs = {"l1": l1, "l2": l1, "lr_power": lr_power}
        number(l2, "'l2' of FtrlOptimizer")
        if l2 != l1:
            reason = f"as fluid 1.8.5 does, the operator gets l1 ({l1}) instead of l2 ({l2})"
            warn_no_effect("Ftrl's l2", f"{reason}; a parameter's L2Decay regularizer acts")


class LambOptimizer(AdamOptimizer):
    """Adam without bias correction, scaled by the norm of the parameter."""

    op_type = "lamb"

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        lamb_weight_decay: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        parameter_list: Sequence[Parameter] | None = None,
        regularization: Any = None,
        grad_clip: Any = None,
        exclude_from_weight_decay_fn: Callable[[Parameter], bool] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            learning_rate, beta1, beta2, epsilon, parameter_list, regularization, grad_clip, name
        )
        self._decay, self._spares = lamb_weight_decay, exclude_from_weight_decay_fn
        self.accumulators = tuple(
            replace(one, is_read_only=one.is_scalar) for one in self.accumulators
        )

    def attributes_of(self, param: Parameter, grad: Variable) -> Mapping[str, Any]:
        del grad
        is_spared = self._spares is not None and self._spares(param)
        shared = {name: self._attrs[name] for name in ("beta1", "beta2", "epsilon")}
        return {**shared, "weight_decay": 0.0 if is_spared else self._decay}

"""The optimizers: each names its operator, its state and its attributes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxfleet.fluid.block import Block
from jaxfleet.fluid.optimizer.base import Accumulator, Optimizer
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.variable import Pairs, Parameter, Variable


class SGDOptimizer(Optimizer):
    """Goes against the gradient."""

    op_type = "sgd"


class MomentumOptimizer(Optimizer):
    """Goes along a decaying sum of gradients; `momentum` says how much of it stays."""

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


class AdagradOptimizer(Optimizer):
    """Divides by the root of the sum of squares."""

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
    """Divides one decaying average by the root of another."""

    op_type = "adam"

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
        lazy_mode: bool = False,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._attrs = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "lazy_mode": lazy_mode}
        self.accumulators = (
            Accumulator("moment1", "Moment1"),
            Accumulator("moment2", "Moment2"),
            Accumulator("beta1_pow_acc", "Beta1Pow", beta1, is_scalar=True),
            Accumulator("beta2_pow_acc", "Beta2Pow", beta2, is_scalar=True),
        )


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
    """Momentum whose rate follows the norms of each layer."""

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
    """Adam by the largest gradient in the place of the second average."""

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
    """Adagrad with a decaying average in the place of the sum."""

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
    """Finds its own rate from averages of gradients and of updates."""

    op_type = "adadelta"
    reads_rate = False
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


class FtrlOptimizer(Optimizer):
    """Follows the regularized leader."""

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
        self._attrs = {"l1": l1, "l2": l2, "lr_power": lr_power}


class LambOptimizer(AdamOptimizer):
    """Scales Adam's update by the norm of the parameter."""

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

    def attributes_of(self, param: Parameter) -> Mapping[str, Any]:
        is_spared = self._spares is not None and self._spares(param)
        shared = {name: self._attrs[name] for name in ("beta1", "beta2", "epsilon")}
        return {**shared, "weight_decay": 0.0 if is_spared else self._decay}

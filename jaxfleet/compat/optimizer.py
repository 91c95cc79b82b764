"""`paddle.optimizer`: fluid's optimizers with the later documents' arguments.

`parameters` is fluid's `parameter_list`, and `weight_decay` its `regularization`: a number means L2
decay.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jaxfleet.fluid import Parameter, Variable
from jaxfleet.fluid import optimizer as fluids
from jaxfleet.fluid.regularizer import L2Decay

Rate: TypeAlias = float | Variable
Parameters: TypeAlias = Sequence[Parameter] | None


def _regularization(weight_decay: Any) -> Any:
    return L2Decay(weight_decay) if isinstance(weight_decay, float | int) else weight_decay


class SGD(fluids.SGDOptimizer):
    """Stochastic gradient descent."""

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        parameters: Parameters = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        decay = _regularization(weight_decay)
        super().__init__(learning_rate, parameters, decay, grad_clip, name)


class Momentum(fluids.MomentumOptimizer):
    """Gradient descent with momentum."""

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        momentum: float = 0.9,
        parameters: Parameters = None,
        use_nesterov: bool = False,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        decay = _regularization(weight_decay)
        super().__init__(learning_rate, momentum, parameters, use_nesterov, decay, grad_clip, name)


class Adagrad(fluids.AdagradOptimizer):
    """Scales gradients by the root of the sum of their squares."""

    def __init__(
        self,
        learning_rate: Rate,
        epsilon: float = 1e-6,
        parameters: Parameters = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        decay, first = _regularization(weight_decay), initial_accumulator_value
        super().__init__(learning_rate, epsilon, parameters, decay, grad_clip, name, first)


class Adam(fluids.AdamOptimizer):
    """Scales one decaying average by the root of another."""

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Parameters = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        lazy_mode: bool = False,
        name: str | None = None,
    ) -> None:
        decay = _regularization(weight_decay)
        super().__init__(
            learning_rate, beta1, beta2, epsilon, parameters, decay, grad_clip, name, lazy_mode
        )


class Adamax(fluids.AdamaxOptimizer):
    """Adam with the maximum norm instead of the second average."""

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Parameters = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        decay = _regularization(weight_decay)
        super().__init__(learning_rate, beta1, beta2, epsilon, parameters, decay, grad_clip, name)


class Adadelta(fluids.AdadeltaOptimizer):
    """Derives its rate from averages of gradients and of updates."""

    plain_rate = 0.001  # the default, not the caller's choice

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        epsilon: float = 1e-6,
        rho: float = 0.95,
        parameters: Parameters = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        decay = _regularization(weight_decay)
        super().__init__(learning_rate, epsilon, rho, parameters, decay, grad_clip, name)


class RMSProp(fluids.RMSPropOptimizer):
    """Scales gradients by the root of a decaying average of their squares."""

    def __init__(
        self,
        learning_rate: Rate,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        momentum: float = 0.0,
        centered: bool = False,
        parameters: Parameters = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        decay = _regularization(weight_decay)
        super().__init__(
            learning_rate, rho, epsilon, momentum, centered, parameters, decay, grad_clip, name
        )


class Lamb(fluids.LambOptimizer):
    """Scales Adam's update by the norm of the parameter."""

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        lamb_weight_decay: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        parameters: Parameters = None,
        grad_clip: Any = None,
        exclude_from_weight_decay_fn: Callable[[Parameter], bool] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            learning_rate,
            lamb_weight_decay,
            beta1,
            beta2,
            epsilon,
            parameters,
            None,
            grad_clip,
            exclude_from_weight_decay_fn,
            name,
        )

"""Regularization: operators that add a penalty on parameters to their gradients."""

from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.guards import name_scope
from jaxfleet.fluid.framework.types import VarType
from jaxfleet.fluid.framework.variable import Pairs, Parameter, Variable


class WeightDecayRegularizer:
    """Adds a penalty to the gradient of each parameter."""

    def __call__(self, param: Parameter, block: Block) -> Variable:
        """Returns the addition to the gradient."""
        raise TypeError(f"{type(self).__name__} does not say what is added to {param} in {block}")


class L2DecayRegularizer(WeightDecayRegularizer):
    """Adds a multiple of the parameter."""

    def __init__(self, regularization_coeff: float = 0.0) -> None:
        self._coeff = float(regularization_coeff)

    def __call__(self, param: Parameter, block: Block) -> Variable:
        return _scaled(block, param, param, self._coeff)


class L1DecayRegularizer(WeightDecayRegularizer):
    """Adds a multiple of the parameter's signs."""

    def __init__(self, regularization_coeff: float = 0.0) -> None:
        self._coeff = float(regularization_coeff)

    def __call__(self, param: Parameter, block: Block) -> Variable:
        signs = block.create_var(dtype=param.dtype)
        block.append_op("sign", {"X": param}, {"Out": signs})
        return _scaled(block, param, signs, self._coeff)


def append_regularization_ops(
    pairs: Pairs, regularization: WeightDecayRegularizer | None = None
) -> Pairs:
    """Adds each parameter's own regularization to its gradient, or else the optimizer's."""
    return [
        (param, _added(param, grad, param.regularizer or regularization)) for param, grad in pairs
    ]


def _added(param: Parameter, grad: Variable, chosen: WeightDecayRegularizer | None) -> Variable:
    """Returns the regularized gradient; a gradient of rows becomes another variable."""
    if chosen is None:
        return grad
    block, out = grad.block, grad
    with block.program._optimized_guard([param, grad]), name_scope("regularization"):
        more = chosen(param, block)
        if grad.type == VarType.SELECTED_ROWS:
            out = block.create_var(name=f"{grad.name}@NEWGRAD@", dtype=param.dtype)
        block.append_op("sum", {"X": [grad, more]}, {"Out": out})
    return out


def _scaled(block: Block, param: Parameter, x: Variable, factor: float) -> Variable:
    out = block.create_var(dtype=param.dtype)
    block.append_op("scale", {"X": x}, {"Out": out}, {"scale": factor})
    return out


L1Decay, L2Decay = L1DecayRegularizer, L2DecayRegularizer

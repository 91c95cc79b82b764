"""Regularization: operators that add a parameter's own share to its gradient."""

from jaxfleet.fluid.block import Block
from jaxfleet.fluid.dtypes import VarType
from jaxfleet.fluid.guards import name_scope
from jaxfleet.fluid.variable import Pairs, Parameter, Variable


class WeightDecayRegularizer:
    """Adds something to the gradient of each parameter."""

    def __call__(self, param: Parameter, block: Block) -> Variable:
        """Returns what is added to the gradient."""
        raise TypeError(f"{type(self).__name__} does not say what is added to {param} in {block}")


class L2DecayRegularizer(WeightDecayRegularizer):
    """Adds the parameter, times a number.

    Args:
        regularization_coeff: the number.
    """

    def __init__(self, regularization_coeff: float = 0.0) -> None:
        self._coeff = float(regularization_coeff)

    def __call__(self, param: Parameter, block: Block) -> Variable:
        return _scaled(block, param, param, self._coeff)


class L1DecayRegularizer(WeightDecayRegularizer):
    """Adds the parameter's signs, times a number.

    Args:
        regularization_coeff: the number.
    """

    def __init__(self, regularization_coeff: float = 0.0) -> None:
        self._coeff = float(regularization_coeff)

    def __call__(self, param: Parameter, block: Block) -> Variable:
        signs = block.create_var(dtype=param.dtype)
        block.append_op("sign", {"X": param}, {"Out": signs})
        return _scaled(block, param, signs, self._coeff)


def append_regularization_ops(
    pairs: Pairs, regularization: WeightDecayRegularizer | None = None
) -> Pairs:
    """Adds to gradients what their parameters' regularization says, or else the optimizer's."""
    return [
        (param, _added(param, grad, param.regularizer or regularization)) for param, grad in pairs
    ]


def _added(param: Parameter, grad: Variable, chosen: WeightDecayRegularizer | None) -> Variable:
    """Returns the gradient with what regularization adds; one of rows becomes another variable."""
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

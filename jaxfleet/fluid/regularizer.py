"""Regularization: operators that add a parameter's own share to its gradient."""

from typing import TypeAlias

from jaxfleet.fluid.block import Block
from jaxfleet.fluid.dtypes import VarType
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.variable import Parameter, Variable

Pairs = list[tuple[Parameter, Variable]]


class L2DecayRegularizer:
    """Adds the parameter, times a number.

    Args:
        regularization_coeff: the number.
    """

    def __init__(self, regularization_coeff: float = 0.0) -> None:
        self._coeff = float(regularization_coeff)

    def __call__(self, param: Parameter, block: Block) -> Variable:
        """Returns what is added to the gradient."""
        return _scaled(block, param, param, self._coeff)


class L1DecayRegularizer:
    """Adds the parameter's signs, times a number.

    Args:
        regularization_coeff: the number.
    """

    def __init__(self, regularization_coeff: float = 0.0) -> None:
        self._coeff = float(regularization_coeff)

    def __call__(self, param: Parameter, block: Block) -> Variable:
        """Returns what is added to the gradient."""
        signs = block.create_var(dtype=param.dtype)
        block.append_op("sign", {"X": param}, {"Out": signs})
        return _scaled(block, param, signs, self._coeff)


Regularizer: TypeAlias = L1DecayRegularizer | L2DecayRegularizer


def append_regularization_ops(pairs: Pairs, regularization: Regularizer | None = None) -> Pairs:
    """Adds to gradients what their parameters' regularization says, or else the optimizer's."""
    return [
        (param, _added(param, grad, param.regularizer or regularization)) for param, grad in pairs
    ]


def _added(param: Parameter, grad: Variable, chosen: Regularizer | None) -> Variable:
    """Returns the gradient with what regularization adds; one of rows becomes another variable."""
    if chosen is None:
        return grad
    block, out = grad.block, grad
    with block.program.role(OpRole.OPTIMIZE, [param.name, grad.name]):
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

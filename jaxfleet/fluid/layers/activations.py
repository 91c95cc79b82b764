"""Layers that apply a function to each element."""

from collections.abc import Callable

from jaxfleet.fluid.layers.one_operator import one_operator
from jaxfleet.fluid.variable import Variable


def _unary(op_type: str) -> Callable[..., Variable]:
    @one_operator(op_type, X="x")
    def layer(x: Variable, name: str | None = None) -> Variable: ...

    layer.__name__ = layer.__qualname__ = op_type
    layer.__doc__ = f"Applies `{op_type}` to each element."
    return layer


relu, tanh, sigmoid, logsigmoid = (_unary(n) for n in ("relu", "tanh", "sigmoid", "logsigmoid"))
square, sqrt, rsqrt, abs = (_unary(n) for n in ("square", "sqrt", "rsqrt", "abs"))
exp, log, erf, reciprocal = (_unary(n) for n in ("exp", "log", "erf", "reciprocal"))
floor, ceil, round, sign = (_unary(n) for n in ("floor", "ceil", "round", "sign"))
sin, cos, sinh, cosh = (_unary(n) for n in ("sin", "cos", "sinh", "cosh"))
asin, acos, atan = (_unary(n) for n in ("asin", "acos", "atan"))
softsign, softplus, tanh_shrink = (_unary(n) for n in ("softsign", "softplus", "tanh_shrink"))


@one_operator("gelu", X="x")
def gelu(x: Variable, approximate: bool = False) -> Variable:
    """Multiplies by the share of a normal distribution below each element."""


@one_operator("leaky_relu", X="x")
def leaky_relu(x: Variable, alpha: float = 0.02, name: str | None = None) -> Variable:
    """Multiplies what is negative by `alpha`."""


@one_operator("elu", X="x")
def elu(x: Variable, alpha: float = 1.0, name: str | None = None) -> Variable:
    """Takes `alpha * (exp(x) - 1)` of what is negative."""


@one_operator("selu", X="x")
def selu(
    x: Variable,
    scale: float | None = None,
    alpha: float | None = None,
    name: str | None = None,
) -> Variable:
    """Scales elu so that it keeps mean and spread (Klambauer et al., 2017)."""


@one_operator("relu6", X="x")
def relu6(x: Variable, threshold: float = 6.0, name: str | None = None) -> Variable:
    """Keeps values between 0 and `threshold`."""


@one_operator("pow", X="x")
def pow(x: Variable, factor: float = 1.0, name: str | None = None) -> Variable:
    """Raises to a power."""


@one_operator("stanh", X="x")
def stanh(
    x: Variable, scale_a: float = 0.67, scale_b: float = 1.7159, name: str | None = None
) -> Variable:
    """Takes `scale_b * tanh(scale_a * x)`."""


@one_operator("hard_sigmoid", X="x")
def hard_sigmoid(
    x: Variable, slope: float = 0.2, offset: float = 0.5, name: str | None = None
) -> Variable:
    """Takes `slope * x + offset`, between 0 and 1."""


@one_operator("swish", X="x")
def swish(x: Variable, beta: float = 1.0, name: str | None = None) -> Variable:
    """Takes `x * sigmoid(beta * x)`."""


@one_operator("hard_swish", X="x")
def hard_swish(
    x: Variable,
    threshold: float = 6.0,
    scale: float = 6.0,
    offset: float = 3.0,
    name: str | None = None,
) -> Variable:
    """Takes `x * min(max(0, x + offset), threshold) / scale`."""


@one_operator("brelu", X="x")
def brelu(
    x: Variable, t_min: float = 0.0, t_max: float = 24.0, name: str | None = None
) -> Variable:
    """Keeps values between two numbers."""


@one_operator("soft_relu", X="x")
def soft_relu(x: Variable, threshold: float = 40.0, name: str | None = None) -> Variable:
    """Takes `log(1 + exp(x))`, with `x` no further from 0 than `threshold`."""


@one_operator("softshrink", X="x", renamed={"alpha": "lambda"})
def softshrink(x: Variable, alpha: float | None = None) -> Variable:
    """Brings values nearer to 0 by `alpha`, half unless given."""


@one_operator("hard_shrink", X="x")
def hard_shrink(x: Variable, threshold: float | None = None) -> Variable:
    """Makes 0 of what is no further from it than `threshold`, half unless given."""


@one_operator("thresholded_relu", X="x")
def thresholded_relu(x: Variable, threshold: float | None = None) -> Variable:
    """Makes 0 of what is no larger than `threshold`, 1 unless given."""


@one_operator("softmax", X="input")
def softmax(
    input: Variable, use_cudnn: bool = False, name: str | None = None, axis: int = -1
) -> Variable:
    """Makes what is along an axis positive, with sum 1."""

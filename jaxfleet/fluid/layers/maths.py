"""Layers that are one operator: arithmetic, activations, reductions, comparisons."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.variable import Variable


def _binary(op_type: str) -> Callable[..., Variable]:
    def layer(
        x: Variable, y: Variable, axis: int = -1, act: str | None = None, name: str | None = None
    ) -> Variable:
        helper = LayerHelper(op_type, name)
        out = helper.output(x.dtype)
        helper.append_op(op_type, {"X": x, "Y": y}, {"Out": out}, {"axis": axis})
        return helper.with_activation(out, act)

    layer.__name__ = op_type
    layer.__doc__ = f"Applies `{op_type}`; `y` stands beside the axes of `x` from `axis` on."
    return layer


elementwise_add, elementwise_sub = _binary("elementwise_add"), _binary("elementwise_sub")
elementwise_mul, elementwise_div = _binary("elementwise_mul"), _binary("elementwise_div")
elementwise_max, elementwise_min = _binary("elementwise_max"), _binary("elementwise_min")
elementwise_pow, elementwise_mod = _binary("elementwise_pow"), _binary("elementwise_mod")
elementwise_floordiv = _binary("elementwise_floordiv")


def _unary(op_type: str) -> Callable[..., Variable]:
    def layer(x: Variable, name: str | None = None) -> Variable:
        helper = LayerHelper(op_type, name)
        out = helper.output(x.dtype)
        helper.append_op(op_type, {"X": x}, {"Out": out})
        return out

    layer.__name__ = op_type
    layer.__doc__ = f"Applies `{op_type}` to each element."
    return layer


relu, tanh, sigmoid, gelu = _unary("relu"), _unary("tanh"), _unary("sigmoid"), _unary("gelu")
square, sqrt, exp, log, abs = (_unary(n) for n in ("square", "sqrt", "exp", "log", "abs"))
floor, ceil, sign, reciprocal = (_unary(n) for n in ("floor", "ceil", "sign", "reciprocal"))
sin, cos, softsign, softplus = (_unary(n) for n in ("sin", "cos", "softsign", "softplus"))
logsigmoid, mean = _unary("logsigmoid"), _unary("mean")


def scale(
    x: Variable,
    scale: float = 1.0,
    bias: float = 0.0,
    bias_after_scale: bool = True,
    act: str | None = None,
    name: str | None = None,
) -> Variable:
    """Multiplies by a number and adds another."""
    helper = LayerHelper("scale", name)
    out = helper.output(x.dtype, stop_gradient=x.stop_gradient)
    attrs = {"scale": float(scale), "bias": float(bias), "bias_after_scale": bias_after_scale}
    helper.append_op("scale", {"X": x}, {"Out": out}, attrs)
    return helper.with_activation(out, act)


def softmax(
    input: Variable,
    use_cudnn: bool = False,
    name: str | None = None,
    axis: int = -1,
) -> Variable:
    """Makes what is along an axis positive, with sum 1."""
    helper = LayerHelper("softmax", name)
    out = helper.output(input.dtype)
    attrs = {"axis": axis, "use_cudnn": use_cudnn}
    helper.append_op("softmax", {"X": input}, {"Out": out}, attrs)
    return out


def clip(x: Variable, min: float, max: float, name: str | None = None) -> Variable:
    """Keeps values between two numbers."""
    helper = LayerHelper("clip", name)
    out = helper.output(x.dtype)
    helper.append_op("clip", {"X": x}, {"Out": out}, {"min": float(min), "max": float(max)})
    return out


def _reduction(op_type: str) -> Callable[..., Variable]:
    def layer(
        input: Variable,
        dim: int | Sequence[int] | None = None,
        keep_dim: bool = False,
        name: str | None = None,
    ) -> Variable:
        helper = LayerHelper(op_type, name)
        out = helper.output(input.dtype)
        axes = [dim] if isinstance(dim, int) else list(dim or [0])
        attrs = {"dim": axes, "keep_dim": keep_dim, "reduce_all": dim is None}
        helper.append_op(op_type, {"X": input}, {"Out": out}, attrs)
        return out

    layer.__name__ = op_type
    layer.__doc__ = f"Applies `{op_type}` along axes; all of them unless given."
    return layer


reduce_sum, reduce_mean = _reduction("reduce_sum"), _reduction("reduce_mean")
reduce_max, reduce_min = _reduction("reduce_max"), _reduction("reduce_min")
reduce_prod = _reduction("reduce_prod")


def matmul(
    x: Variable,
    y: Variable,
    transpose_x: bool = False,
    transpose_y: bool = False,
    alpha: float = 1.0,
    name: str | None = None,
) -> Variable:
    """Multiplies the matrices that the last two axes are."""
    helper = LayerHelper("matmul", name)
    out = helper.output(x.dtype)
    attrs = {"transpose_X": transpose_x, "transpose_Y": transpose_y, "alpha": float(alpha)}
    helper.append_op("matmul", {"X": x, "Y": y}, {"Out": out}, attrs)
    return out


def mul(
    x: Variable,
    y: Variable,
    x_num_col_dims: int = 1,
    y_num_col_dims: int = 1,
    name: str | None = None,
) -> Variable:
    """Multiplies matrices, which the first axes of each are the rows of."""
    helper = LayerHelper("mul", name)
    out = helper.output(x.dtype)
    attrs = {"x_num_col_dims": x_num_col_dims, "y_num_col_dims": y_num_col_dims}
    helper.append_op("mul", {"X": x, "Y": y}, {"Out": out}, attrs)
    return out


def compared(op_type: str, x: Variable, y: Any = None, cond: Variable | None = None) -> Variable:
    """Compares, or joins truth values."""
    helper = LayerHelper(op_type)
    out = cond if cond is not None else helper.output("bool", stop_gradient=True)
    inputs = {"X": x} if y is None else {"X": x, "Y": y}
    helper.append_op(op_type, inputs, {"Out": out})
    return out

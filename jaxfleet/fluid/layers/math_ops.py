"""Elementwise functions, arithmetic, comparisons, products and reductions."""

from collections.abc import Callable, Sequence

from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.nested_sequences import levels_for
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import one_operator, variables


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
    """Multiplies each element by the normal distribution function of it."""


@one_operator("leaky_relu", X="x")
def leaky_relu(x: Variable, alpha: float = 0.02, name: str | None = None) -> Variable:
    """Multiplies negative elements by `alpha`."""


@one_operator("elu", X="x")
def elu(x: Variable, alpha: float = 1.0, name: str | None = None) -> Variable:
    """Maps negative elements to `alpha * (exp(x) - 1)`."""


@one_operator("selu", X="x")
def selu(
    x: Variable, scale: float | None = None, alpha: float | None = None, name: str | None = None
) -> Variable:
    """Scaled elu that preserves mean and variance (Klambauer et al., 2017)."""


@one_operator("relu6", X="x")
def relu6(x: Variable, threshold: float = 6.0, name: str | None = None) -> Variable:
    """Clips to 0 and `threshold`."""


@one_operator("pow", X="x")
def pow(x: Variable, factor: float = 1.0, name: str | None = None) -> Variable:
    """Raises to a power."""


@one_operator("stanh", X="x")
def stanh(
    x: Variable, scale_a: float = 0.67, scale_b: float = 1.7159, name: str | None = None
) -> Variable:
    """`scale_b * tanh(scale_a * x)`."""


@one_operator("hard_sigmoid", X="x")
def hard_sigmoid(
    x: Variable, slope: float = 0.2, offset: float = 0.5, name: str | None = None
) -> Variable:
    """`slope * x + offset`, clipped to 0 and 1."""


@one_operator("swish", X="x")
def swish(x: Variable, beta: float = 1.0, name: str | None = None) -> Variable:
    """`x * sigmoid(beta * x)`."""


@one_operator("hard_swish", X="x")
def hard_swish(
    x: Variable,
    threshold: float = 6.0,
    scale: float = 6.0,
    offset: float = 3.0,
    name: str | None = None,
) -> Variable:
    """`x * min(max(0, x + offset), threshold) / scale`."""


@one_operator("brelu", X="x")
def brelu(
    x: Variable, t_min: float = 0.0, t_max: float = 24.0, name: str | None = None
) -> Variable:
    """Clips to two numbers."""


@one_operator("soft_relu", X="x")
def soft_relu(x: Variable, threshold: float = 40.0, name: str | None = None) -> Variable:
    """`log(1 + exp(x))`, with `x` clipped to `-threshold` and `threshold`."""


@one_operator("softshrink", X="x", renamed={"alpha": "lambda"})
def softshrink(x: Variable, alpha: float | None = None) -> Variable:
    """Moves elements towards 0 by `alpha`, 0.5 unless given."""


@one_operator("hard_shrink", X="x")
def hard_shrink(x: Variable, threshold: float | None = None) -> Variable:
    """Sets elements within `threshold` of 0, 0.5 unless given, to 0."""


@one_operator("thresholded_relu", X="x")
def thresholded_relu(x: Variable, threshold: float | None = None) -> Variable:
    """Sets elements of at most `threshold`, 1 unless given, to 0."""


@one_operator("softmax", X="input")
def softmax(
    input: Variable, use_cudnn: bool = False, name: str | None = None, axis: int = -1
) -> Variable:
    """Normalizes exponentials along an axis to sum 1."""


def _compared(op_type: str) -> Callable[..., Variable]:
    @one_operator(op_type, X="x", Y="y", into="cond", dtype="bool", frozen=True)
    def layer(x: Variable, y: Variable, cond: Variable | None = None) -> Variable: ...

    layer.__name__ = layer.__qualname__ = op_type
    layer.__doc__ = f"Applies `{op_type}` element by element, into `cond` if it is given."
    return layer


@one_operator("less_than", X="x", Y="y", into="cond", dtype="bool", frozen=True)
def less_than(
    x: Variable, y: Variable, force_cpu: bool | None = None, cond: Variable | None = None
) -> Variable:
    """Compares elements for `x < y`, into `cond` if given."""


less_equal, greater_than = _compared("less_equal"), _compared("greater_than")
greater_equal, equal, not_equal = (_compared(n) for n in ("greater_equal", "equal", "not_equal"))


def _joined(op_type: str) -> Callable[..., Variable]:
    @one_operator(op_type, X="x", Y="y", into="out", dtype="bool", frozen=True)
    def layer(
        x: Variable, y: Variable, out: Variable | None = None, name: str | None = None
    ) -> Variable: ...

    layer.__name__ = layer.__qualname__ = op_type
    layer.__doc__ = f"Applies `{op_type}` element by element, into `out` if it is given."
    return layer


logical_and, logical_or = _joined("logical_and"), _joined("logical_or")
logical_xor = _joined("logical_xor")


@one_operator("logical_not", X="x", into="out", dtype="bool", frozen=True)
def logical_not(x: Variable, out: Variable | None = None, name: str | None = None) -> Variable:
    """Negates booleans, into `out` if given."""


def is_empty(x: Variable, cond: Variable | None = None) -> Variable:
    """Whether an array has no elements, or beams have no rows: `[1]`."""
    (given,) = variables("is_empty", "x", x)
    levels = levels_for(given)
    inputs = {"X": given} if levels is None else {"X": given, "XLevels": levels}
    out = {"Out": "bool" if cond is None else cond}
    (made,) = LayerHelper("is_empty").add(inputs, out, frozen=True)
    return made


def _elementwise(op_type: str) -> Callable[..., Variable]:
    @one_operator(op_type, X="x", Y="y")
    def layer(
        x: Variable, y: Variable, axis: int = -1, act: str | None = None, name: str | None = None
    ) -> Variable: ...

    layer.__name__ = layer.__qualname__ = op_type
    layer.__doc__ = f"Applies `{op_type}`; `y` stands beside the axes of `x` from `axis` on."
    return layer


elementwise_add, elementwise_sub = _elementwise("elementwise_add"), _elementwise("elementwise_sub")
elementwise_mul, elementwise_div = _elementwise("elementwise_mul"), _elementwise("elementwise_div")
elementwise_max, elementwise_min = _elementwise("elementwise_max"), _elementwise("elementwise_min")
elementwise_pow, elementwise_mod = _elementwise("elementwise_pow"), _elementwise("elementwise_mod")
elementwise_floordiv = _elementwise("elementwise_floordiv")


@one_operator("scale", X="x")
def scale(
    x: Variable,
    scale: float = 1.0,
    bias: float = 0.0,
    bias_after_scale: bool = True,
    act: str | None = None,
    name: str | None = None,
) -> Variable:
    """Multiplies by a number and adds another."""


@one_operator("mean", X="x")
def mean(x: Variable, name: str | None = None) -> Variable:
    """Mean of all elements: `[1]`."""


@one_operator("clip", X="x")
def clip(x: Variable, min: float, max: float, name: str | None = None) -> Variable:
    """Clips to two numbers."""


@one_operator("clip_by_norm", X="x")
def clip_by_norm(x: Variable, max_norm: float, name: str | None = None) -> Variable:
    """Scales an array to a norm of at most `max_norm`."""


@one_operator("cumsum", X="x")
def cumsum(
    x: Variable, axis: int | None = None, exclusive: bool | None = None, reverse: bool | None = None
) -> Variable:
    """Cumulative sum along an axis, the last unless given."""


def _reduction(op_type: str, dtype: str | None = None) -> Callable[..., Variable]:
    def layer(
        input: Variable,
        dim: int | Sequence[int] | None = None,
        keep_dim: bool = False,
        name: str | None = None,
    ) -> Variable:
        (x,) = variables(op_type, "input", input)
        axes = [dim] if isinstance(dim, int) else list(dim or [0])
        is_whole = (not dim and not isinstance(dim, int)) or len(axes) == len(x.shape)
        attrs = {"dim": axes, "keep_dim": keep_dim, "reduce_all": is_whole}
        helper = LayerHelper(op_type, name)
        (out,) = helper.add({"X": x}, {"Out": dtype or x.dtype}, attrs)
        return out

    layer.__name__ = layer.__qualname__ = op_type
    layer.__doc__ = f"Applies `{op_type}` along axes; all of them unless given."
    return layer


reduce_sum, reduce_mean = _reduction("reduce_sum"), _reduction("reduce_mean")
reduce_max, reduce_min = _reduction("reduce_max"), _reduction("reduce_min")
reduce_prod = _reduction("reduce_prod")
reduce_all, reduce_any = _reduction("reduce_all", "bool"), _reduction("reduce_any", "bool")


@one_operator("matmul", X="x", Y="y",
              renamed={"transpose_x": "transpose_X", "transpose_y": "transpose_Y"})  # fmt: skip
def matmul(
    x: Variable,
    y: Variable,
    transpose_x: bool = False,
    transpose_y: bool = False,
    alpha: float = 1.0,
    name: str | None = None,
) -> Variable:
    """Batched matrix product over the last two axes."""


@one_operator("mul", X="x", Y="y")
def mul(
    x: Variable,
    y: Variable,
    x_num_col_dims: int = 1,
    y_num_col_dims: int = 1,
    name: str | None = None,
) -> Variable:
    """Matrix product of arrays flattened to matrices, whose rows are the first axes."""


def sum(x: Variable | Sequence[Variable]) -> Variable:
    """Sums arrays of one shape."""
    return sums(x)


def sums(input: Variable | Sequence[Variable], out: Variable | None = None) -> Variable:
    """Sums arrays of one shape, into another if given."""
    xs = variables("sum", "input", input)
    if not _are_alike([x.shape for x in xs]):
        shapes = ", ".join(str(list(x.shape)) for x in xs)
        raise mistake(f"sum adds arrays of one shape, not {shapes or 'none'}")
    (made,) = LayerHelper("sum").add({"X": xs}, {"Out": out or xs[0].dtype})
    return made


def _are_alike(shapes: Sequence[Sequence[int]]) -> bool:
    """Whether shapes are compatible: -1 may be any size."""
    if len({len(shape) for shape in shapes}) != 1:
        return False
    return all(len({*sizes} - {-1}) <= 1 for sizes in zip(*shapes, strict=True))


@one_operator("cos_sim", X="X", Y="Y", aside={"XNorm": "", "YNorm": ""})
def cos_sim(X: Variable, Y: Variable) -> Variable:  # noqa: N803  # fluid's names
    """Cosine similarity of rows: f32[b,n], f32[b,n] or f32[1,n] -> f32[b,1]."""


@one_operator("norm", X="x", aside={"Norm": ""}, layer_type="l2_normalize")
def _norm(x: Variable, axis: int, epsilon: float, name: str | None) -> Variable: ...


def l2_normalize(
    x: Variable, axis: int, epsilon: float = 1e-12, name: str | None = None
) -> Variable:
    """Divides by the L2 norm along an axis."""
    return _norm(x, 0 if len(x.shape) == 1 else axis, epsilon, name)

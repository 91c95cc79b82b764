"""Layers of arithmetic: on two arrays, on one with a number, products, reductions."""

from collections.abc import Callable, Sequence

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import one_operator, variables
from jaxfleet.fluid.variable import Variable


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
    """Averages all elements: `[1]`."""


@one_operator("clip", X="x")
def clip(x: Variable, min: float, max: float, name: str | None = None) -> Variable:
    """Keeps values between two numbers."""


@one_operator("clip_by_norm", X="x")
def clip_by_norm(x: Variable, max_norm: float, name: str | None = None) -> Variable:
    """Scales an array so that its norm is at most `max_norm`."""


@one_operator("cumsum", X="x")
def cumsum(
    x: Variable,
    axis: int | None = None,
    exclusive: bool | None = None,
    reverse: bool | None = None,
) -> Variable:
    """Adds up along an axis, the last unless given."""


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
    """Multiplies the matrices that the last two axes are."""


@one_operator("mul", X="x", Y="y")
def mul(
    x: Variable,
    y: Variable,
    x_num_col_dims: int = 1,
    y_num_col_dims: int = 1,
    name: str | None = None,
) -> Variable:
    """Multiplies matrices, which the first axes of each are the rows of."""


def sum(x: Variable | Sequence[Variable]) -> Variable:
    """Adds arrays of one shape."""
    return _sum(x, None)


def sums(input: Variable | Sequence[Variable], out: Variable | None = None) -> Variable:
    """Adds arrays of one shape, into another if one is given."""
    return _sum(input, out)


def _sum(given: Variable | Sequence[Variable], out: Variable | None) -> Variable:
    xs = variables("sum", "input", given)
    if not _are_alike([x.shape for x in xs]):
        shapes = ", ".join(str(list(x.shape)) for x in xs)
        raise mistake(f"sum adds arrays of one shape, not {shapes or 'none'}")
    (made,) = LayerHelper("sum").add({"X": xs}, {"Out": out or xs[0].dtype})
    return made


def _are_alike(shapes: Sequence[Sequence[int]]) -> bool:
    """Tells whether shapes may be one: -1 may be any size."""
    if len({len(shape) for shape in shapes}) != 1:
        return False
    return all(len({*sizes} - {-1}) <= 1 for sizes in zip(*shapes, strict=True))


@one_operator("cos_sim", X="X", Y="Y", aside={"XNorm": "", "YNorm": ""})
def cos_sim(X: Variable, Y: Variable) -> Variable:  # noqa: N803  # fluid's names
    """Takes the cosine of the angle between rows: f32[b,n], f32[b,n] or f32[1,n] -> f32[b,1]."""


@one_operator("norm", X="x", aside={"Norm": ""}, layer_type="l2_normalize")
def _norm(x: Variable, axis: int, epsilon: float, name: str | None) -> Variable: ...


def l2_normalize(
    x: Variable, axis: int, epsilon: float = 1e-12, name: str | None = None
) -> Variable:
    """Divides by the length along an axis."""
    return _norm(x, 0 if len(x.shape) == 1 else axis, epsilon, name)

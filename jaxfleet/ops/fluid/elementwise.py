"""Elementwise arithmetic, comparisons and activations."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import erf

from jaxfleet.ops.fluid.schema import Attributes, BySlot, Gradient, fluid_op
from jaxfleet.ops.registry import Array


def beside(x: Array, y: Array, axis: int) -> Array:
    """Reshapes `y` for broadcasting against `x`: fluid aligns it at `axis`.

    Args:
        x: the larger operand.
        y: has the sizes of consecutive axes of `x`; trailing axes of size 1 do not count.
        axis: the first of these axes in `x`; -1: `y` has the last ones.
    """
    if y.ndim > x.ndim:
        raise ValueError(f"the second operand has more axes, {y.ndim}, than the first, {x.ndim}")
    if axis < 0 or x.ndim == y.ndim:
        return y
    shape = list(y.shape)
    while len(shape) > 1 and shape[-1] == 1 and axis + len(shape) > x.ndim:
        shape.pop()
    return y.reshape((*shape, *[1] * (x.ndim - axis - len(shape))))


def _quotient(x: Array, y: Array) -> Array:
    """Divides; integers are truncated towards zero, as in C++."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return lax.div(*jnp.broadcast_arrays(x, y))
    return jnp.divide(x, y)


_BINARY: Mapping[str, Callable[[Array, Array], Array]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": _quotient,
    "max": lambda x, y: jnp.where(x > y, x, y),  # a tie's gradient goes to `y`
    "min": lambda x, y: jnp.where(x < y, x, y),
    "pow": jnp.power,
}


def _binary(name: str, function: Callable[[Array, Array], Array]) -> None:
    op_type = f"elementwise_{name}"
    gradient = Gradient(f"{op_type}_grad", ("X", "Y"), ("X", "Y"))

    @fluid_op(op_type, inputs="X Y", attrs={"axis": -1}, gradient=gradient)
    def compute(attrs: Mapping[str, Any], x: Array, y: Array) -> Array:
        return function(x, beside(x, y, attrs["axis"]))


for _name, _function in _BINARY.items():
    _binary(_name, _function)


_WITHOUT_GRADIENT: Mapping[str, Callable[[Array, Array], Array]] = {
    "less_than": jnp.less,
    "less_equal": jnp.less_equal,
    "greater_than": jnp.greater,
    "greater_equal": jnp.greater_equal,
    "equal": jnp.equal,
    "not_equal": jnp.not_equal,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "elementwise_mod": jnp.mod,
    "elementwise_floordiv": jnp.floor_divide,
}


def _without_gradient(name: str, function: Callable[..., Array]) -> None:
    @fluid_op(name, inputs="X Y", attrs={"axis": -1, "force_cpu": False})
    def compute(attrs: Mapping[str, Any], x: Array, y: Array) -> Array:
        return function(x, beside(x, y, attrs["axis"]))


for _name, _function in _WITHOUT_GRADIENT.items():
    _without_gradient(_name, _function)


@fluid_op("clip", inputs="X", attrs={"min": 0.0, "max": 0.0}, gradient="X -> X")
def clip(attrs: Mapping[str, Any], x: Array) -> Array:
    """Clips to `min` and `max`."""
    return jnp.clip(x, attrs["min"], attrs["max"])


@fluid_op("increment", inputs="X", attrs={"step": 1.0},
          gradient=Gradient("assign", (), ("X",), by=lambda _: {}))  # fmt: skip
def increment(attrs: Mapping[str, Any], x: Array) -> Array:
    """Adds `step`."""
    return x + jnp.asarray(attrs["step"], x.dtype)


@fluid_op("clip_by_norm", inputs="X", attrs={"max_norm": 1.0}, gradient="X -> X")
def clip_by_norm(attrs: Mapping[str, Any], x: Array) -> Array:
    """Scales an array to a norm of at most `max_norm`."""
    norm = jnp.sqrt(jnp.maximum(jnp.sum(x * x), 1e-30))  # differentiable at 0
    return jnp.where(norm > attrs["max_norm"], x * (attrs["max_norm"] / norm), x)


def _cumsum_back(attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    names = ("axis", "flatten", "exclusive")
    return {**{name: attrs[name] for name in names}, "reverse": not attrs["reverse"]}


@fluid_op("cumsum", inputs="X",
          attrs={"axis": -1, "flatten": False, "exclusive": False, "reverse": False},
          gradient=Gradient("cumsum", (), ("X",), by=_cumsum_back))  # fmt: skip
def cumsum(attrs: Mapping[str, Any], x: Array) -> Array:
    """Cumulative sum along an axis; `exclusive` omits the element itself."""
    x = x.reshape(-1) if attrs["flatten"] else x
    axis = attrs["axis"]
    made = lax.cumsum(x, axis=axis % x.ndim, reverse=attrs["reverse"])
    return made - x if attrs["exclusive"] else made


_PLAIN: Mapping[str, Callable[[Array], Array]] = {
    "square": jnp.square,
    "abs": jnp.abs,
    "log": jnp.log,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "asin": jnp.arcsin,
    "acos": jnp.arccos,
    "atan": jnp.arctan,
    "erf": erf,
    "softsign": jax.nn.soft_sign,
    "softplus": jax.nn.softplus,
    "logsigmoid": jax.nn.log_sigmoid,
    "tanh_shrink": lambda x: x - jnp.tanh(x),
}


def _softshrink(x: Array, limit: float) -> Array:
    return jnp.where(x > limit, x - limit, jnp.where(x < -limit, x + limit, 0))


def _selu(x: Array, scale: float, alpha: float) -> Array:
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(jnp.minimum(x, 0)))


def _soft_relu(x: Array, limit: float) -> Array:
    return jnp.log1p(jnp.exp(jnp.clip(x, -limit, limit)))


def _soft_relu_back(out: Array, limit: float) -> Array:
    is_inside = (out > _soft_relu(-limit, limit)) & (out < _soft_relu(limit, limit))
    return jnp.where(is_inside, 1 - jnp.exp(-out), 0)


# Functions, with their attributes in argument order.
_WITH_ATTRIBUTES: Mapping[str, tuple[Callable[..., Array], Mapping[str, Any]]] = {
    "gelu": (lambda x, approximate: jax.nn.gelu(x, approximate=approximate),
             {"approximate": False}),
    "leaky_relu": (lambda x, alpha: jnp.where(x > 0, x, x * alpha), {"alpha": 0.02}),
    "elu": (jax.nn.elu, {"alpha": 1.0}),
    "selu": (_selu, {"scale": 1.0507009873554805, "alpha": 1.6732632423543772}),
    "pow": (jnp.power, {"factor": 1.0}),
    "stanh": (lambda x, a, b: b * jnp.tanh(a * x), {"scale_a": 0.67, "scale_b": 1.7159}),
    "swish": (lambda x, beta: x * jax.nn.sigmoid(beta * x), {"beta": 1.0}),
    "hard_swish": (lambda x, threshold, scale, offset: x * jnp.clip(x + offset, 0, threshold)
                   / scale, {"threshold": 6.0, "scale": 6.0, "offset": 3.0}),
    "brelu": (jnp.clip, {"t_min": 0.0, "t_max": 24.0}),
    "softshrink": (_softshrink, {"lambda": 0.5}),
    "hard_shrink": (lambda x, limit: jnp.where(jnp.abs(x) > limit, x, 0), {"threshold": 0.5}),
    "thresholded_relu": (lambda x, limit: jnp.where(x > limit, x, 0), {"threshold": 1.0}),
}  # fmt: skip

_FromOutput: TypeAlias = tuple[Callable[..., Array], Callable[..., Array], Mapping[str, Any]]

# Functions whose gradient operator reads the result: the function, the factor of the gradient
# computed from the result, and the attributes.
_FROM_OUTPUT: Mapping[str, _FromOutput] = {
    "relu": (jax.nn.relu, lambda out: out > 0, {}),
    "tanh": (jnp.tanh, lambda out: 1 - out * out, {}),
    "sigmoid": (jax.nn.sigmoid, lambda out: out * (1 - out), {}),
    "exp": (jnp.exp, lambda out: out, {}),
    "sqrt": (jnp.sqrt, lambda out: 0.5 / out, {}),
    "rsqrt": (jax.lax.rsqrt, lambda out: -0.5 * out * out * out, {}),
    "reciprocal": (jnp.reciprocal, lambda out: -out * out, {}),
    "relu6": (lambda x, threshold: jnp.clip(x, 0, threshold),
              lambda out, threshold: (out > 0) & (out < threshold), {"threshold": 6.0}),
    "hard_sigmoid": (lambda x, slope, offset: jnp.clip(slope * x + offset, 0, 1),
                     lambda out, slope, _: jnp.where((out > 0) & (out < 1), slope, 0),
                     {"slope": 0.2, "offset": 0.5}),
    "soft_relu": (_soft_relu, _soft_relu_back, {"threshold": 40.0}),
}  # fmt: skip

# Piecewise constant functions: the gradient is zero, and fluid computes it.
_FLAT: Mapping[str, Callable[[Array], Array]] = {
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": jnp.round,
}


def _arguments(attrs: Attributes, declared: Mapping[str, Any]) -> list[Any]:
    return [attrs[name] for name in declared]


def _from_input(name: str, function: Callable[..., Array], declared: Attributes) -> None:
    gradient = Gradient(f"{name}_grad", ("X",), ("X",))

    @fluid_op(name, inputs="X", attrs=declared, gradient=gradient)
    def compute(attrs: Attributes, x: Array) -> Array:
        return function(x, *_arguments(attrs, declared))


def _from_output(
    name: str, function: Callable[..., Array], factor: Callable[..., Array], declared: Attributes
) -> None:
    def back(attrs: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
        return {"X": grads["Out"] * factor(reads["Out"], *_arguments(attrs, declared))}

    gradient = Gradient(f"{name}_grad", ("Out",), ("X",), back)

    @fluid_op(name, inputs="X", attrs=declared, gradient=gradient)
    def compute(attrs: Attributes, x: Array) -> Array:
        return function(x, *_arguments(attrs, declared))


def _no_slope(_: Attributes, __: BySlot, grads: BySlot) -> BySlot:
    return {"X": jnp.zeros_like(grads["Out"])}


def _flat(name: str, function: Callable[[Array], Array]) -> None:
    @fluid_op(name, inputs="X", gradient=Gradient(f"{name}_grad", (), ("X",), _no_slope))
    def compute(_: Attributes, x: Array) -> Array:
        return function(x)


@fluid_op("sign", inputs="X", gradient=Gradient("scale", (), ("X",), by=lambda _: {"scale": 0.0}))
def sign(_: Attributes, x: Array) -> Array:
    """Sign of elements: 1, 0 or -1."""
    return jnp.sign(x)


@fluid_op("logical_not", inputs="X")
def logical_not(_: Attributes, x: Array) -> Array:
    """Negates booleans."""
    return jnp.logical_not(x)


for _name, _activation in _PLAIN.items():
    _from_input(_name, _activation, {})
for _name, (_activation, _declared) in _WITH_ATTRIBUTES.items():
    _from_input(_name, _activation, _declared)
for _name, (_activation, _factor, _declared) in _FROM_OUTPUT.items():
    _from_output(_name, _activation, _factor, _declared)
for _name, _activation in _FLAT.items():
    _flat(_name, _activation)

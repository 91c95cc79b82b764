"""Operators that apply a function to each element."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.scipy.special import erf

from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.schema import Attributes, Gradient, Value, fluid_op
from jaxfleet.ops.registry import Array

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


# What they compute, with their attributes in the order of its arguments.
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

# Those whose gradient operator reads what they made: what they compute, the factor of the gradient
# from it, and their attributes.
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

# Those that are flat: their gradient is zero, and fluid computes it.
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

    define_gradient(name)


def _from_output(
    name: str,
    function: Callable[..., Array],
    factor: Callable[..., Array],
    declared: Attributes,
) -> None:
    def back(
        attrs: Attributes, reads: Mapping[str, Value], grads: Mapping[str, Value]
    ) -> Mapping[str, Value]:
        return {"X": grads["Out"] * factor(reads["Out"], *_arguments(attrs, declared))}

    gradient = Gradient(f"{name}_grad", ("Out",), ("X",), back)

    @fluid_op(name, inputs="X", attrs=declared, gradient=gradient)
    def compute(attrs: Attributes, x: Array) -> Array:
        return function(x, *_arguments(attrs, declared))

    define_gradient(name)


def _no_slope(
    _: Attributes, __: Mapping[str, Value], grads: Mapping[str, Value]
) -> Mapping[str, Value]:
    return {"X": jnp.zeros_like(grads["Out"])}


def _flat(name: str, function: Callable[[Array], Array]) -> None:
    @fluid_op(name, inputs="X", gradient=Gradient(f"{name}_grad", (), ("X",), _no_slope))
    def compute(_: Attributes, x: Array) -> Array:
        return function(x)

    define_gradient(name)


@fluid_op("sign", inputs="X",
          gradient=Gradient("scale", (), ("X",), by=lambda _: {"scale": 0.0}))  # fmt: skip
def sign(_: Attributes, x: Array) -> Array:
    """Tells whether elements are above zero, 1, or below, -1."""
    return jnp.sign(x)


@fluid_op("logical_not", inputs="X")
def logical_not(_: Attributes, x: Array) -> Array:
    """Tells which elements are false."""
    return jnp.logical_not(x)


for _name, _function in _PLAIN.items():
    _from_input(_name, _function, {})
for _name, (_function, _declared) in _WITH_ATTRIBUTES.items():
    _from_input(_name, _function, _declared)
for _name, (_function, _factor, _declared) in _FROM_OUTPUT.items():
    _from_output(_name, _function, _factor, _declared)
for _name, _function in _FLAT.items():
    _flat(_name, _function)

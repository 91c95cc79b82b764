"""Operators that compute each element by itself."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.schema import Gradient, Value, fluid_op
from jaxfleet.ops.registry import Array


def beside(x: Array, y: Array, axis: int) -> Array:
    """Returns `y` with the axes that let it stand beside `x`: fluid aligns it from `axis` on.

    Args:
        x: the larger of the two.
        y: has the sizes of some axes of `x` that lie together; axes of size 1 at its end do not
            count.
        axis: where they begin in `x`; -1: `y` has the last ones.
    """
    if axis < 0 or x.ndim == y.ndim:
        return y
    shape = list(y.shape)
    while len(shape) > 1 and shape[-1] == 1 and axis + len(shape) > x.ndim:
        shape.pop()
    return y.reshape((*shape, *[1] * (x.ndim - axis - len(shape))))


_BINARY: Mapping[str, Callable[[Array, Array], Array]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "pow": jnp.power,
    "mod": jnp.mod,
    "floordiv": jnp.floor_divide,
}


def _binary(name: str, function: Callable[[Array, Array], Array]) -> None:
    op_type = f"elementwise_{name}"
    gradient = Gradient(f"{op_type}_grad", ("X", "Y"), ("X", "Y"))

    @fluid_op(op_type, inputs="X Y", attrs={"axis": -1}, gradient=gradient)
    def compute(attrs: Mapping[str, Any], x: Array, y: Array) -> Array:
        return function(x, beside(x, y, attrs["axis"]))

    define_gradient(op_type)


for _name, _function in _BINARY.items():
    _binary(_name, _function)


_UNARY: Mapping[str, Callable[[Array], Array]] = {
    "square": jnp.square,
    "abs": jnp.abs,
    "log": jnp.log,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "softsign": jax.nn.soft_sign,
    "softplus": jax.nn.softplus,
    "logsigmoid": jax.nn.log_sigmoid,
}

# Those whose gradient operator reads what they made: (what they compute, the gradient from it).
_FROM_OUTPUT: Mapping[str, tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]] = {
    "relu": (jax.nn.relu, lambda out, grad: jnp.where(out > 0, grad, 0)),
    "tanh": (jnp.tanh, lambda out, grad: grad * (1 - out * out)),
    "sigmoid": (jax.nn.sigmoid, lambda out, grad: grad * out * (1 - out)),
    "exp": (jnp.exp, lambda out, grad: grad * out),
    "sqrt": (jnp.sqrt, lambda out, grad: grad * 0.5 / out),
    "reciprocal": (jnp.reciprocal, lambda out, grad: -grad * out * out),
}


def _unary(name: str, function: Callable[[Array], Array]) -> None:
    @fluid_op(name, inputs="X", gradient=Gradient(f"{name}_grad", ("X",), ("X",)))
    def compute(_: Mapping[str, Any], x: Array) -> Array:
        return function(x)

    define_gradient(name)


def _from_output(
    name: str, function: Callable[[Array], Array], grad: Callable[[Array, Array], Array]
) -> None:
    def back(
        _: Mapping[str, Any], reads: Mapping[str, Value], grads: Mapping[str, Value]
    ) -> Mapping[str, Value]:
        return {"X": grad(reads["Out"], grads["Out"])}

    @fluid_op(name, inputs="X", gradient=Gradient(f"{name}_grad", ("Out",), ("X",), back))
    def compute(_: Mapping[str, Any], x: Array) -> Array:
        return function(x)

    define_gradient(name)


for _name, _one in _UNARY.items():
    _unary(_name, _one)
for _name, (_one, _back) in _FROM_OUTPUT.items():
    _from_output(_name, _one, _back)


_FLAT: Mapping[str, Callable[[Array], Array]] = {
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": jnp.round,
    "sign": jnp.sign,
    "logical_not": jnp.logical_not,
}
_COMPARED: Mapping[str, Callable[[Array, Array], Array]] = {
    "less_than": jnp.less,
    "less_equal": jnp.less_equal,
    "greater_than": jnp.greater,
    "greater_equal": jnp.greater_equal,
    "equal": jnp.equal,
    "not_equal": jnp.not_equal,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
}


def _without_gradient(name: str, function: Callable[..., Array], inputs: str) -> None:
    @fluid_op(name, inputs=inputs, attrs={"axis": -1, "force_cpu": False})
    def compute(_: Mapping[str, Any], *values: Array) -> Array:
        return function(*values)


for _name, _one in _FLAT.items():
    _without_gradient(_name, _one, "X")
for _name, _two in _COMPARED.items():
    _without_gradient(_name, _two, "X Y")


@fluid_op("clip", inputs="X", attrs={"min": 0.0, "max": 0.0},
          gradient=Gradient("clip_grad", ("X",), ("X",)))  # fmt: skip
def clip(attrs: Mapping[str, Any], x: Array) -> Array:
    """Keeps values between `min` and `max`."""
    return jnp.clip(x, attrs["min"], attrs["max"])


define_gradient("clip")


@fluid_op("increment", inputs="X", attrs={"step": 1.0})
def increment(attrs: Mapping[str, Any], x: Array) -> Array:
    """Adds `step`."""
    return x + jnp.asarray(attrs["step"], x.dtype)


@fluid_op("clip_by_norm", inputs="X", attrs={"max_norm": 1.0})
def clip_by_norm(attrs: Mapping[str, Any], x: Array) -> Array:
    """Scales an array so that its norm is at most `max_norm`."""
    norm = jnp.linalg.norm(x)
    return jnp.where(norm > attrs["max_norm"], x * (attrs["max_norm"] / norm), x)

"""Operators on two arrays, element by element: arithmetic, comparisons; and on one with limits."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.schema import Gradient, fluid_op
from jaxfleet.ops.registry import Array


def beside(x: Array, y: Array, axis: int) -> Array:
    """Returns `y` with the axes that let it stand beside `x`: fluid aligns it from `axis` on.

    Args:
        x: the larger of the two.
        y: has the sizes of some axes of `x` that lie together; axes of size 1 at its end do not
            count.
        axis: where they begin in `x`; -1: `y` has the last ones.
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
    """Divides; whole numbers towards zero, as C++ does."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return lax.div(*jnp.broadcast_arrays(x, y))
    return jnp.divide(x, y)


_BINARY: Mapping[str, Callable[[Array, Array], Array]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": _quotient,
    "max": lambda x, y: jnp.where(x > y, x, y),  # of equal ones, `y` has the gradient
    "min": lambda x, y: jnp.where(x < y, x, y),
    "pow": jnp.power,
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


@fluid_op("clip", inputs="X", attrs={"min": 0.0, "max": 0.0},
          gradient=Gradient("clip_grad", ("X",), ("X",)))  # fmt: skip
def clip(attrs: Mapping[str, Any], x: Array) -> Array:
    """Keeps values between `min` and `max`."""
    return jnp.clip(x, attrs["min"], attrs["max"])


define_gradient("clip")


@fluid_op("increment", inputs="X", attrs={"step": 1.0},
          gradient=Gradient("assign", (), ("X",), by=lambda _: {}))  # fmt: skip
def increment(attrs: Mapping[str, Any], x: Array) -> Array:
    """Adds `step`."""
    return x + jnp.asarray(attrs["step"], x.dtype)


@fluid_op("clip_by_norm", inputs="X", attrs={"max_norm": 1.0},
          gradient=Gradient("clip_by_norm_grad", ("X",), ("X",)))  # fmt: skip
def clip_by_norm(attrs: Mapping[str, Any], x: Array) -> Array:
    """Scales an array so that its norm is at most `max_norm`."""
    norm = jnp.sqrt(jnp.maximum(jnp.sum(x * x), 1e-30))  # which 0 can be differentiated at
    return jnp.where(norm > attrs["max_norm"], x * (attrs["max_norm"] / norm), x)


define_gradient("clip_by_norm")


def _cumsum_back(attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    names = ("axis", "flatten", "exclusive")
    return {**{name: attrs[name] for name in names}, "reverse": not attrs["reverse"]}


@fluid_op("cumsum", inputs="X",
          attrs={"axis": -1, "flatten": False, "exclusive": False, "reverse": False},
          gradient=Gradient("cumsum", (), ("X",), by=_cumsum_back))  # fmt: skip
def cumsum(attrs: Mapping[str, Any], x: Array) -> Array:
    """Adds up along an axis; `exclusive` leaves an element itself out."""
    x = x.reshape(-1) if attrs["flatten"] else x
    axis = attrs["axis"]
    made = lax.cumsum(x, axis=axis % x.ndim, reverse=attrs["reverse"])
    return made - x if attrs["exclusive"] else made

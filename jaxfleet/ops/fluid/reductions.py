"""Matrix products, reductions and softmax."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxfleet.ops.fluid.schema import Attributes, BySlot, Gradient, fluid_op
from jaxfleet.ops.registry import Array


def _rows(x: Array, axes: int) -> Array:
    """Flattens to a matrix: the first axes are rows, the others columns."""
    return x.reshape(math.prod(x.shape[:axes]), math.prod(x.shape[axes:]))


@fluid_op("mul", inputs="X Y", attrs={"x_num_col_dims": 1, "y_num_col_dims": 1},
          gradient="X Y -> X Y")  # fmt: skip
def mul(attrs: Attributes, x: Array, y: Array) -> Array:
    """Matrix product of arrays flattened to matrices, whose rows are the first axes."""
    split_x, split_y = attrs["x_num_col_dims"], attrs["y_num_col_dims"]
    made = _rows(x, split_x) @ _rows(y, split_y)
    return made.reshape(*x.shape[:split_x], *y.shape[split_y:])


@fluid_op("matmul", inputs="X Y", attrs={"transpose_X": False, "transpose_Y": False, "alpha": 1.0},
          gradient="X Y -> X Y")  # fmt: skip
def matmul(attrs: Attributes, x: Array, y: Array) -> Array:
    """Batched matrix product over the last two axes."""
    x = jnp.swapaxes(x, -1, -2) if attrs["transpose_X"] and x.ndim > 1 else x
    y = jnp.swapaxes(y, -1, -2) if attrs["transpose_Y"] and y.ndim > 1 else y
    made = jnp.matmul(x, y) * attrs["alpha"]
    return made if made.ndim else made.reshape(1)


@fluid_op("mean", inputs="X", gradient="X -> X")
def mean(_: Attributes, x: Array) -> Array:
    """Mean of all elements: `[1]`."""
    return jnp.mean(x).reshape(1)


_OVER = {"dim": [0], "keep_dim": False, "reduce_all": False}


def _reduced(attrs: Attributes, function: Callable[..., Array], x: Array) -> Array:
    axes = None if attrs["reduce_all"] else tuple(attrs["dim"])
    made = function(x, axis=axes, keepdims=attrs["keep_dim"])
    return made if made.ndim else made.reshape(1)


def _extreme_back(attrs: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
    """The gradient for every element that equals the extreme, as in fluid."""
    x, shape = reads["X"], _kept_shape(attrs, reads["X"])
    found, grad = reads["Out"].reshape(shape), grads["Out"].reshape(shape)
    return {"X": jnp.where(x == found, grad, 0)}


def _kept_shape(attrs: Attributes, x: Array) -> list[int]:
    over = {axis % x.ndim for axis in attrs["dim"]}
    gone = range(x.ndim) if attrs["reduce_all"] else over
    return [1 if axis in gone else size for axis, size in enumerate(x.shape)]


def _gradient(name: str) -> Gradient | None:
    match name:
        case "sum" | "mean":
            return Gradient(f"reduce_{name}_grad", ("X",), ("X",))
        case "max" | "min":
            return Gradient(f"reduce_{name}_grad", ("X", "Out"), ("X",), _extreme_back)
        case "prod":
            return Gradient(f"reduce_{name}_grad", ("X", "Out"), ("X",))
    return None


def _reduction(name: str) -> None:
    function: Callable[..., Array] = getattr(jnp, name)
    gradient = _gradient(name)

    @fluid_op(f"reduce_{name}", inputs="X", attrs=_OVER, gradient=gradient)
    def compute(attrs: Attributes, x: Array) -> Array:
        return _reduced(attrs, function, x)


for _name in ("sum", "mean", "max", "min", "prod", "all", "any"):
    _reduction(_name)


def _softmax_back(attrs: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
    out, grad = reads["Out"], grads["Out"]
    inner = jnp.sum(grad * out, axis=attrs["axis"], keepdims=True)
    return {"X": (grad - inner) * out}


@fluid_op("softmax", inputs="X", attrs={"axis": -1, "use_cudnn": False},
          gradient=Gradient("softmax_grad", ("Out",), ("X",), _softmax_back))  # fmt: skip
def softmax(attrs: Attributes, x: Array) -> Array:
    """Normalizes exponentials along an axis to sum 1."""
    return jax.nn.softmax(x, axis=attrs["axis"])

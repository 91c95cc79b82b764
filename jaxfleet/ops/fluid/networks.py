"""Operators that networks are made of: products, reductions, activations over axes, losses."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxfleet.ops.fluid.arrays import shape_record
from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.schema import Gradient, Value, fluid_op
from jaxfleet.ops.registry import Array

Attributes = Mapping[str, Any]


def _rows(x: Array, axes: int) -> Array:
    """Returns a matrix: the first axes are rows, the others columns."""
    return x.reshape(math.prod(x.shape[:axes]), math.prod(x.shape[axes:]))


@fluid_op("mul", inputs="X Y", attrs={"x_num_col_dims": 1, "y_num_col_dims": 1},
          gradient=Gradient("mul_grad", ("X", "Y"), ("X", "Y")))  # fmt: skip
def mul(attrs: Attributes, x: Array, y: Array) -> Array:
    """Multiplies matrices, which the first axes of each are the rows of."""
    split_x, split_y = attrs["x_num_col_dims"], attrs["y_num_col_dims"]
    made = _rows(x, split_x) @ _rows(y, split_y)
    return made.reshape(*x.shape[:split_x], *y.shape[split_y:])


@fluid_op("matmul", inputs="X Y", attrs={"transpose_X": False, "transpose_Y": False, "alpha": 1.0},
          gradient=Gradient("matmul_grad", ("X", "Y"), ("X", "Y")))  # fmt: skip
def matmul(attrs: Attributes, x: Array, y: Array) -> Array:
    """Multiplies the matrices that the last two axes are."""
    x = jnp.swapaxes(x, -1, -2) if attrs["transpose_X"] and x.ndim > 1 else x
    y = jnp.swapaxes(y, -1, -2) if attrs["transpose_Y"] and y.ndim > 1 else y
    made = jnp.matmul(x, y) * attrs["alpha"]
    return made if made.ndim else made.reshape(1)


@fluid_op("mean", inputs="X", gradient=Gradient("mean_grad", ("X",), ("X",)))
def mean(_: Attributes, x: Array) -> Array:
    """Averages all elements: `[1]`."""
    return jnp.mean(x).reshape(1)


_REDUCTIONS: Mapping[str, Callable[..., Array]] = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "max": jnp.max,
    "min": jnp.min,
    "prod": jnp.prod,
}


def _reduction(name: str, function: Callable[..., Array]) -> None:
    op_type = f"reduce_{name}"

    @fluid_op(op_type, inputs="X", attrs={"dim": [0], "keep_dim": False, "reduce_all": False},
              gradient=Gradient(f"{op_type}_grad", ("X",), ("X",)))  # fmt: skip
    def compute(attrs: Attributes, x: Array) -> Array:
        axes = None if attrs["reduce_all"] else tuple(attrs["dim"])
        made = function(x, axis=axes, keepdims=attrs["keep_dim"])
        return made if made.ndim else made.reshape(1)

    define_gradient(op_type)


for _name, _function in _REDUCTIONS.items():
    _reduction(_name, _function)


def _softmax_back(
    attrs: Attributes, reads: Mapping[str, Value], grads: Mapping[str, Value]
) -> Mapping[str, Value]:
    out, grad = reads["Out"], grads["Out"]
    inner = jnp.sum(grad * out, axis=attrs["axis"], keepdims=True)
    return {"X": (grad - inner) * out}


@fluid_op("softmax", inputs="X", attrs={"axis": -1, "use_cudnn": False},
          gradient=Gradient("softmax_grad", ("Out",), ("X",), _softmax_back))  # fmt: skip
def softmax(attrs: Attributes, x: Array) -> Array:
    """Makes what is along an axis positive, with sum 1."""
    return jax.nn.softmax(x, axis=attrs["axis"])


def _picked(x: Array, label: Array) -> Array:
    """Returns the element of each row that its label names: the last axis is then 1."""
    index = label.reshape(*x.shape[:-1], 1)
    return jnp.take_along_axis(x, jnp.clip(index, 0, x.shape[-1] - 1), axis=-1)


def _cross_entropy_back(
    attrs: Attributes, reads: Mapping[str, Value], grads: Mapping[str, Value]
) -> Mapping[str, Value]:
    shape = reads["XShape"].shape[1:]
    label = reads["Label"].reshape(*shape[:-1], 1)
    slope = -grads["Y"].reshape(label.shape) / reads["MatchX"].reshape(label.shape)
    is_counted = (label == jnp.arange(shape[-1])) & (label != attrs["ignore_index"])
    return {"X": jnp.where(is_counted, slope, 0)}


@fluid_op("cross_entropy2", inputs="X Label", outputs="Y MatchX XShape",
          attrs={"ignore_index": -100},
          gradient=Gradient("cross_entropy_grad2", ("Label", "MatchX", "XShape"), ("X",),
                            _cross_entropy_back))  # fmt: skip
def cross_entropy2(attrs: Attributes, x: Array, label: Array) -> Value:
    """Takes minus the log of the probability of the label, a row each."""
    match = _picked(x, label)
    is_counted = label.reshape(match.shape) != attrs["ignore_index"]
    return jnp.where(is_counted, -jnp.log(match), 0), match, shape_record(x)


@fluid_op("cross_entropy", inputs="X Label", outputs="Y",
          attrs={"soft_label": True, "ignore_index": -100},
          gradient=Gradient("cross_entropy_grad", ("X", "Label"), ("X",)))  # fmt: skip
def cross_entropy(attrs: Attributes, x: Array, label: Array) -> Array:
    """Takes the cross entropy with a distribution, or with a label."""
    if attrs["soft_label"]:
        return -jnp.sum(label * jnp.log(x), axis=-1, keepdims=True)
    match = _picked(x, label)
    return jnp.where(label.reshape(match.shape) != attrs["ignore_index"], -jnp.log(match), 0)


def _softmax_loss_back(
    attrs: Attributes, reads: Mapping[str, Value], grads: Mapping[str, Value]
) -> Mapping[str, Value]:
    made, label, grad = reads["Softmax"], reads["Label"], grads["Loss"]
    if attrs["soft_label"]:
        return {"Logits": grad * (made * jnp.sum(label, axis=-1, keepdims=True) - label)}
    index = label.reshape(*made.shape[:-1], 1)
    slope = made - (index == jnp.arange(made.shape[-1]))
    return {"Logits": jnp.where(index != attrs["ignore_index"], slope * grad, 0)}


@fluid_op("softmax_with_cross_entropy", inputs="Logits Label", outputs="Softmax Loss",
          attrs={"soft_label": False, "ignore_index": -100, "numeric_stable_mode": True,
                 "axis": -1},
          gradient=Gradient("softmax_with_cross_entropy_grad", ("Softmax", "Label"), ("Logits",),
                            _softmax_loss_back))  # fmt: skip
def softmax_with_cross_entropy(attrs: Attributes, logits: Array, label: Array) -> Value:
    """Takes softmax and cross entropy in one, which does not overflow."""
    logs = jax.nn.log_softmax(logits, axis=-1)
    if attrs["soft_label"]:
        return jnp.exp(logs), -jnp.sum(label * logs, axis=-1, keepdims=True)
    loss = -_picked(logs, label)
    is_counted = label.reshape(loss.shape) != attrs["ignore_index"]
    return jnp.exp(logs), jnp.where(is_counted, loss, 0)


@fluid_op("sigmoid_cross_entropy_with_logits", inputs="X Label",
          attrs={"ignore_index": -100, "normalize": False},
          gradient=Gradient("sigmoid_cross_entropy_with_logits_grad", ("X", "Label"),
                            ("X",)))  # fmt: skip
def sigmoid_cross_entropy_with_logits(attrs: Attributes, x: Array, label: Array) -> Array:
    """Takes the cross entropy of independent probabilities, given as logits."""
    loss = jnp.maximum(x, 0) - x * label + jnp.log1p(jnp.exp(-jnp.abs(x)))
    is_counted = label != attrs["ignore_index"]
    loss = jnp.where(is_counted, loss, 0)
    return loss / jnp.maximum(jnp.sum(is_counted), 1) if attrs["normalize"] else loss


for _type in ("mul", "matmul", "mean", "softmax", "cross_entropy2", "cross_entropy",
              "softmax_with_cross_entropy", "sigmoid_cross_entropy_with_logits"):  # fmt: skip
    define_gradient(_type)

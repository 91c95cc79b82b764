"""Operators that compare what was predicted with what is so."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.schema import Attributes, Gradient, Value, fluid_op
from jaxfleet.ops.fluid.shapes import shape_record
from jaxfleet.ops.registry import Array


def _picked(x: Array, label: Array, axis: int = -1) -> Array:
    """Returns the element of each row that its label names: the axis is then 1.

    It is NaN where there is no such element: fluid raised, which a device cannot.
    """
    index, count = _beside(x, label, axis), x.shape[axis]
    made = jnp.take_along_axis(x, jnp.clip(index, 0, count - 1), axis=axis)
    return jnp.where((index >= 0) & (index < count), made, jnp.nan)


def _beside(x: Array, label: Array, axis: int) -> Array:
    """Returns labels in the shape of `x`, but for the axis, which is 1."""
    shape = list(x.shape)
    shape[axis] = 1
    return label.reshape(shape)


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
    made, label, grad, axis = reads["Softmax"], reads["Label"], grads["Loss"], attrs["axis"]
    if attrs["soft_label"]:
        return {"Logits": grad * (made * jnp.sum(label, axis=axis, keepdims=True) - label)}
    index, count = _beside(made, label, axis), made.shape[axis]
    grad = jnp.where(index != attrs["ignore_index"], grad, 0)
    places = list(jnp.meshgrid(*map(jnp.arange, index.shape), indexing="ij"))
    # JAX counts a negative index from the end: it is put where the scatter drops it.
    places[axis] = jnp.where(index < 0, count, index)
    # A scatter, since XLA for CPU then runs the rest of backward a tenth faster than with a mask
    # (benchmarks/executor.py): what it runs side by side no longer fights for the cores.
    return {"Logits": (made * grad).at[tuple(places)].add(-grad, mode="drop")}


@fluid_op("softmax_with_cross_entropy", inputs="Logits Label", outputs="Softmax Loss",
          attrs={"soft_label": False, "ignore_index": -100, "numeric_stable_mode": True,
                 "axis": -1},
          gradient=Gradient("softmax_with_cross_entropy_grad", ("Softmax", "Label"), ("Logits",),
                            _softmax_loss_back))  # fmt: skip
def softmax_with_cross_entropy(attrs: Attributes, logits: Array, label: Array) -> Value:
    """Takes softmax and cross entropy in one, which does not overflow."""
    axis = attrs["axis"]
    logs = jax.nn.log_softmax(logits, axis=axis)
    if attrs["soft_label"]:
        return jnp.exp(logs), -jnp.sum(label * logs, axis=axis, keepdims=True)
    loss = -_picked(logs, label, axis)
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


@fluid_op("log_loss", inputs="Predicted Labels", outputs="Loss", attrs={"epsilon": 1e-4},
          gradient=Gradient("log_loss_grad", ("Predicted", "Labels"), ("Predicted",)))  # fmt: skip
def log_loss(attrs: Attributes, predicted: Array, labels: Array) -> Array:
    """Takes minus the log of the probability of what is so, for a yes or a no."""
    small = attrs["epsilon"]
    return -labels * jnp.log(predicted + small) - (1 - labels) * jnp.log(1 - predicted + small)


def _huber_back(
    attrs: Attributes, reads: Mapping[str, Value], grads: Mapping[str, Value]
) -> Mapping[str, Value]:
    slope = jnp.clip(reads["Residual"], -attrs["delta"], attrs["delta"]) * grads["Out"]
    return {"X": -slope, "Y": slope}


@fluid_op("huber_loss", inputs="X Y", outputs="Out Residual", attrs={"delta": 1.0},
          gradient=Gradient("huber_loss_grad", ("Residual",), ("X", "Y"), _huber_back))  # fmt: skip
def huber_loss(attrs: Attributes, x: Array, y: Array) -> Value:
    """Takes half the square of a difference up to `delta`, and grows evenly beyond it."""
    residual, delta = y - x, attrs["delta"]
    size = jnp.abs(residual)
    near = size <= delta
    return jnp.where(near, 0.5 * residual**2, delta * (size - 0.5 * delta)), residual


def _smooth_back(
    attrs: Attributes, _: Mapping[str, Value], grads: Mapping[str, Value]
) -> Mapping[str, Value]:
    return {"X": grads["Out"] * (1 - attrs["epsilon"])}


@fluid_op("label_smooth", inputs="X PriorDist?", attrs={"epsilon": 0.0},
          gradient=Gradient("label_smooth_grad", (), ("X",), _smooth_back))  # fmt: skip
def label_smooth(attrs: Attributes, x: Array, prior: Array | None) -> Array:
    """Mixes labels with a prior, an even one unless given."""
    share = attrs["epsilon"]
    other = 1 / x.shape[-1] if prior is None else prior.reshape(x.shape[-1])
    return (1 - share) * x + share * other


for _type in ("cross_entropy2", "cross_entropy", "softmax_with_cross_entropy",
              "sigmoid_cross_entropy_with_logits", "log_loss", "huber_loss",
              "label_smooth"):  # fmt: skip
    define_gradient(_type)

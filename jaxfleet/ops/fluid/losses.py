"""Losses with their gradients, and metrics (accuracy, AUC), which have none."""

import jax
import jax.numpy as jnp

from jaxfleet.ops.fluid.schema import Attributes, BySlot, Gradient, Value, fluid_op
from jaxfleet.ops.fluid.shapes import shape_record
from jaxfleet.ops.registry import Array


def _picked(x: Array, label: Array, axis: int = -1) -> Array:
    """The element of each row at its label: the axis has size 1; NaN out of range.

    Fluid raises there, which a device cannot.
    """
    index, count = _beside(x, label, axis), x.shape[axis]
    made = jnp.take_along_axis(x, jnp.clip(index, 0, count - 1), axis=axis)
    return jnp.where((index >= 0) & (index < count), made, jnp.nan)


def _beside(x: Array, label: Array, axis: int) -> Array:
    """Labels in the shape of `x`, except for `axis`, of size 1."""
    shape = list(x.shape)
    shape[axis] = 1
    return label.reshape(shape)


def _cross_entropy_back(attrs: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
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
    """Negative log of the label's probability, by row."""
    match = _picked(x, label)
    is_counted = label.reshape(match.shape) != attrs["ignore_index"]
    return jnp.where(is_counted, -jnp.log(match), 0), match, shape_record(x)


@fluid_op("cross_entropy", inputs="X Label", outputs="Y",
          attrs={"soft_label": True, "ignore_index": -100},
          gradient="X Label -> X")  # fmt: skip
def cross_entropy(attrs: Attributes, x: Array, label: Array) -> Array:
    """Cross entropy with a distribution or a label."""
    if attrs["soft_label"]:
        return -jnp.sum(label * jnp.log(x), axis=-1, keepdims=True)
    match = _picked(x, label)
    return jnp.where(label.reshape(match.shape) != attrs["ignore_index"], -jnp.log(match), 0)


def _softmax_loss_back(attrs: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
    made, label, grad, axis = reads["Softmax"], reads["Label"], grads["Loss"], attrs["axis"]
    if attrs["soft_label"]:
        return {"Logits": grad * (made * jnp.sum(label, axis=axis, keepdims=True) - label)}
    index, count = _beside(made, label, axis), made.shape[axis]
    grad = jnp.where(index != attrs["ignore_index"], grad, 0)
    places = list(jnp.meshgrid(*map(jnp.arange, index.shape), indexing="ij"))
    # JAX counts a negative index from the end: it is moved out of range, for the scatter to drop.
    places[axis] = jnp.where(index < 0, count, index)
    # A scatter, since XLA for CPU then runs the rest of backward a tenth faster than with a mask
    # (benchmarks/executor.py): its parallel tasks no longer compete for the cores.
    return {"Logits": (made * grad).at[tuple(places)].add(-grad, mode="drop")}


@fluid_op("softmax_with_cross_entropy", inputs="Logits Label", outputs="Softmax Loss",
          attrs={"soft_label": False, "ignore_index": -100, "numeric_stable_mode": True,
                 "axis": -1},
          gradient=Gradient("softmax_with_cross_entropy_grad", ("Softmax", "Label"), ("Logits",),
                            _softmax_loss_back))  # fmt: skip
def softmax_with_cross_entropy(attrs: Attributes, logits: Array, label: Array) -> Value:
    """Softmax and cross entropy in one, without overflow."""
    axis = attrs["axis"]
    logs = jax.nn.log_softmax(logits, axis=axis)
    if attrs["soft_label"]:
        return jnp.exp(logs), -jnp.sum(label * logs, axis=axis, keepdims=True)
    loss = -_picked(logs, label, axis)
    is_counted = label.reshape(loss.shape) != attrs["ignore_index"]
    return jnp.exp(logs), jnp.where(is_counted, loss, 0)


@fluid_op("sigmoid_cross_entropy_with_logits", inputs="X Label",
          attrs={"ignore_index": -100, "normalize": False},
          gradient="X Label -> X")  # fmt: skip
def sigmoid_cross_entropy_with_logits(attrs: Attributes, x: Array, label: Array) -> Array:
    """Cross entropy of independent probabilities, given as logits."""
    loss = jnp.maximum(x, 0) - x * label + jnp.log1p(jnp.exp(-jnp.abs(x)))
    is_counted = label != attrs["ignore_index"]
    loss = jnp.where(is_counted, loss, 0)
    return loss / jnp.maximum(jnp.sum(is_counted), 1) if attrs["normalize"] else loss


@fluid_op("log_loss", inputs="Predicted Labels", outputs="Loss", attrs={"epsilon": 1e-4},
          gradient="Predicted Labels -> Predicted")  # fmt: skip
def log_loss(attrs: Attributes, predicted: Array, labels: Array) -> Array:
    """Negative log likelihood of a binary label."""
    small = attrs["epsilon"]
    return -labels * jnp.log(predicted + small) - (1 - labels) * jnp.log(1 - predicted + small)


def _huber_back(attrs: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
    slope = jnp.clip(reads["Residual"], -attrs["delta"], attrs["delta"]) * grads["Out"]
    return {"X": -slope, "Y": slope}


@fluid_op("huber_loss", inputs="X Y", outputs="Out Residual", attrs={"delta": 1.0},
          gradient=Gradient("huber_loss_grad", ("Residual",), ("X", "Y"), _huber_back))  # fmt: skip
def huber_loss(attrs: Attributes, x: Array, y: Array) -> Value:
    """Half the squared difference up to `delta`, linear beyond it."""
    residual, delta = y - x, attrs["delta"]
    size = jnp.abs(residual)
    near = size <= delta
    return jnp.where(near, 0.5 * residual**2, delta * (size - 0.5 * delta)), residual


def _smooth_back(attrs: Attributes, _: BySlot, grads: BySlot) -> BySlot:
    return {"X": grads["Out"] * (1 - attrs["epsilon"])}


@fluid_op("label_smooth", inputs="X PriorDist?", attrs={"epsilon": 0.0},
          gradient=Gradient("label_smooth_grad", (), ("X",), _smooth_back))  # fmt: skip
def label_smooth(attrs: Attributes, x: Array, prior: Array | None) -> Array:
    """Mixes labels with a prior distribution, uniform unless given."""
    share = attrs["epsilon"]
    other = 1 / x.shape[-1] if prior is None else prior.reshape(x.shape[-1])
    return (1 - share) * x + share * other


@fluid_op("accuracy", inputs="Out Indices Label", outputs="Accuracy Correct Total")
def accuracy(_: Attributes, __: Array, indices: Array, label: Array) -> Value:
    """Share of rows whose label is among the indices."""
    hits = jnp.sum(jnp.any(indices == label.reshape(-1, 1), axis=1))
    total = indices.shape[0]
    share = hits.astype(jnp.float32) / total
    return share.reshape(1), hits.astype(jnp.int32).reshape(1), jnp.full(1, total, jnp.int32)


@fluid_op("auc", inputs="Predict Label StatPos StatNeg", outputs="AUC StatPosOut StatNegOut",
          attrs={"curve": "ROC", "num_thresholds": 4095, "slide_steps": 1})  # fmt: skip
def auc(
    attrs: Attributes, predict: Array, label: Array, positives: Array, negatives: Array
) -> Value:
    """Estimates the area under the ROC curve from histograms of the predictions.

    Without `slide_steps` the counts are `[1, bins]` and accumulate over all runs. With k of them
    they are flat: the bins of the last k runs, then their sum, then the number of runs.
    """
    bins, steps = attrs["num_thresholds"] + 1, attrs["slide_steps"]
    place = (predict[:, -1] * attrs["num_thresholds"]).astype(jnp.int32)
    is_positive = label.reshape(-1) != 0
    counted = [
        jnp.zeros(bins, positives.dtype).at[place].add(chosen.astype(positives.dtype))
        for chosen in (is_positive, ~is_positive)
    ]
    if steps == 0:
        after = [old + new for old, new in zip((positives, negatives), counted, strict=True)]
        return _area(after[0].reshape(-1), after[1].reshape(-1)), *after
    windows = [
        _windowed(old, new, steps) for old, new in zip((positives, negatives), counted, strict=True)
    ]
    sums = (window.reshape(-1)[steps * bins : -1] for window in windows)
    return _area(*sums), *windows


def _windowed(old: Array, new: Array, steps: int) -> Array:
    """Counts of the last `steps` runs, with the newest replacing the oldest."""
    flat, bins = old.reshape(-1), new.shape[0]
    runs = flat[:-1].reshape(steps + 1, bins)
    place = flat[-1] % steps
    total = runs[-1] - runs[place] + new
    runs = runs.at[place].set(new).at[-1].set(total)
    return jnp.concatenate([runs.reshape(-1), flat[-1:] + 1]).reshape(old.shape)


def _area(positives: Array, negatives: Array) -> Array:
    """The area under the curve of the counts above each threshold: `[1]`."""
    above = [
        jnp.concatenate([jnp.zeros(1), jnp.cumsum(counts[::-1]).astype(jnp.float32)])
        for counts in (positives, negatives)
    ]
    right, wrong = above
    area = jnp.sum(jnp.diff(wrong) * (right[1:] + right[:-1]) / 2)
    pairs = right[-1] * wrong[-1]
    return jnp.where(pairs > 0, area / jnp.maximum(pairs, 1), 0.0).reshape(1)

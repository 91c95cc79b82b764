"""Operators that tell how good predictions are; nothing differentiates them."""

import jax.numpy as jnp

from jaxfleet.ops.fluid.schema import Attributes, Value, fluid_op
from jaxfleet.ops.registry import Array


@fluid_op("accuracy", inputs="Out Indices Label", outputs="Accuracy Correct Total")
def accuracy(_: Attributes, __: Array, indices: Array, label: Array) -> Value:
    """Tells which share of rows has its label among the indices."""
    hits = jnp.sum(jnp.any(indices == label.reshape(-1, 1), axis=1))
    total = indices.shape[0]
    share = hits.astype(jnp.float32) / total
    return share.reshape(1), hits.astype(jnp.int32).reshape(1), jnp.full(1, total, jnp.int32)


@fluid_op("auc", inputs="Predict Label StatPos StatNeg", outputs="AUC StatPosOut StatNegOut",
          attrs={"curve": "ROC", "num_thresholds": 4095, "slide_steps": 1})  # fmt: skip
def auc(
    attrs: Attributes, predict: Array, label: Array, positives: Array, negatives: Array
) -> Value:
    """Estimates the area under the ROC curve from counts of predictions by their size.

    Without `slide_steps` the counts are `[1, bins]` and grow for ever. With k of them they are
    flat: the bins of the last k runs, one after the other, then their sum, then how many runs
    there were.
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
    """Returns counts of the last `steps` runs with the newest in the place of the oldest."""
    flat, bins = old.reshape(-1), new.shape[0]
    runs = flat[:-1].reshape(steps + 1, bins)
    place = flat[-1] % steps
    total = runs[-1] - runs[place] + new
    runs = runs.at[place].set(new).at[-1].set(total)
    return jnp.concatenate([runs.reshape(-1), flat[-1:] + 1]).reshape(old.shape)


def _area(positives: Array, negatives: Array) -> Array:
    """Returns the area under the curve through the counts above each threshold: `[1]`."""
    above = [
        jnp.concatenate([jnp.zeros(1), jnp.cumsum(counts[::-1]).astype(jnp.float32)])
        for counts in (positives, negatives)
    ]
    right, wrong = above
    area = jnp.sum(jnp.diff(wrong) * (right[1:] + right[:-1]) / 2)
    pairs = right[-1] * wrong[-1]
    return jnp.where(pairs > 0, area / jnp.maximum(pairs, 1), 0.0).reshape(1)

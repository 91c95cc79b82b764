"""Random operators, keyed by a seed of their own and the number of the run."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxfleet.ops.fluid.arrays import device_dtype
from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.schema import Attributes, Gradient, Value, fluid_op
from jaxfleet.ops.registry import Array

# `Run` is ours: u32[], the number of the run.
RUN_SLOT = "Run"
RUN = "@RUN@"  # the variable of this input
DRAWS_AS = "draws_as"  # attribute: number that an operator shares with its copies, for equal draws
_DRAWN = {"shape": [1], "dtype": "float32", "seed": 0}
RANDOM_OPS = (
    *("uniform_random", "gaussian_random", "truncated_gaussian_random", "dropout"),
    *("nce", "sample_logits"),
)


def key_of(attrs: Attributes, run: Array | None) -> Array:
    """The key of an operator's draws."""
    key = jax.random.key(attrs["seed"])
    return key if run is None else jax.random.fold_in(key, run)


@fluid_op("uniform_random", inputs="Run?",
          attrs={**_DRAWN, "min": -1.0, "max": 1.0, "diag_num": 0, "diag_step": 0,
                 "diag_val": 1.0})  # fmt: skip
def uniform_random(attrs: Attributes, run: Array | None) -> Array:
    """Uniform samples from `min` to `max`, except for a diagonal of `diag_num` elements."""
    dtype, low, high = device_dtype(attrs["dtype"]), attrs["min"], attrs["max"]
    drawn = jax.random.uniform(key_of(attrs, run), attrs["shape"], dtype, low, high)
    if not attrs["diag_num"]:
        return drawn
    places = jnp.arange(attrs["diag_num"]) * (attrs["diag_step"] + 1)
    return drawn.reshape(-1).at[places].set(attrs["diag_val"]).reshape(drawn.shape)


@fluid_op("gaussian_random", inputs="Run?", attrs={**_DRAWN, "mean": 0.0, "std": 1.0})
def gaussian_random(attrs: Attributes, run: Array | None) -> Array:
    """Normal samples."""
    drawn = jax.random.normal(key_of(attrs, run), attrs["shape"], device_dtype(attrs["dtype"]))
    return drawn * attrs["std"] + attrs["mean"]


@fluid_op("truncated_gaussian_random", inputs="Run?", attrs={**_DRAWN, "mean": 0.0, "std": 1.0})
def truncated_gaussian_random(attrs: Attributes, run: Array | None) -> Array:
    """Normal samples within two deviations."""
    shape, dtype = attrs["shape"], device_dtype(attrs["dtype"])
    drawn = jax.random.truncated_normal(key_of(attrs, run), -2.0, 2.0, shape, dtype)
    return drawn * attrs["std"] + attrs["mean"]


def _dropout_back(
    attrs: Attributes, reads: Mapping[str, Value], grads: Mapping[str, Value]
) -> Mapping[str, Value]:
    kept = grads["Out"] * reads["Mask"].astype(grads["Out"].dtype)
    return {"X": kept / _kept_share(attrs) if _is_upscaled(attrs) else kept}


@fluid_op("dropout", inputs="X Run?", outputs="Out Mask",
          attrs={"dropout_prob": 0.5, "is_test": False, "fix_seed": False, "seed": 0,
                 "dropout_implementation": "downgrade_in_infer"},
          gradient=Gradient("dropout_grad", ("Mask",), ("X",), _dropout_back))  # fmt: skip
def dropout(attrs: Attributes, x: Array, run: Array | None) -> Value:
    """Sets a share of the elements to zero; in test, scales all by the kept share."""
    if attrs["is_test"]:
        tested = x if _is_upscaled(attrs) else x * (1 - attrs["dropout_prob"])
        return tested, jnp.ones(x.shape, jnp.uint8)
    key = key_of(attrs, None if attrs["fix_seed"] else run)
    mask = jax.random.uniform(key, x.shape) >= attrs["dropout_prob"]
    kept = jnp.where(mask, x / _kept_share(attrs) if _is_upscaled(attrs) else x, 0)
    return kept, mask.astype(jnp.uint8)


define_gradient("dropout")


def _is_upscaled(attrs: Attributes) -> bool:
    return bool(attrs["dropout_implementation"] == "upscale_in_train")


def _kept_share(attrs: Attributes) -> float:
    return max(1.0 - float(attrs["dropout_prob"]), 1e-20)

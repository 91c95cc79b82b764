"""Operators of deep gradient compression (Lin, Han, Mao, Wang and Dally, 2018)."""

import jax.numpy as jnp

from jaxfleet.ops.fluid.schema import Attributes, Value, fluid_op
from jaxfleet.ops.fluid.updates import momentum
from jaxfleet.ops.registry import Array

_RAMP = {"rampup_begin_step": 0.0, "rampup_step": 1.0}


@fluid_op("dgc", inputs="U V Grad current_step", outputs="U_out V_out Grad_out",
          attrs={"m": 0.9, "use_nesterov": False, "sparsity": [0.999], **_RAMP})  # fmt: skip
def dgc(attrs: Attributes, u: Array, v: Array, grad: Array, step: Array) -> Value:
    """Keeps the largest elements of a gradient that momentum and earlier steps have added up to.

    What is left out stays in `V`, and its momentum in `U`; both begin anew where an element is
    kept. Before `rampup_begin_step` the gradient stays whole. `sparsity` is the part that is left
    out, in periods of equal length over `rampup_step` steps; the last one stays.
    """
    since = step.reshape(()).astype(jnp.float32) - attrs["rampup_begin_step"]
    if attrs["use_nesterov"]:
        moved = attrs["m"] * (u + grad)
        summed = v + moved + grad
    else:
        moved = attrs["m"] * u + grad
        summed = v + moved
    sizes = jnp.abs(summed)
    kept = [max(1, int(grad.size * (1 - part))) for part in attrs["sparsity"]]
    period = (since * len(kept) / attrs["rampup_step"]).astype(jnp.int32)
    count = jnp.array(kept)[jnp.clip(period, 0, len(kept) - 1)]
    is_kept = sizes >= jnp.sort(sizes.reshape(-1))[grad.size - count]
    is_whole = since < 0
    return (
        jnp.where(is_whole, u, jnp.where(is_kept, 0, moved)),
        jnp.where(is_whole, v, jnp.where(is_kept, 0, summed)),
        jnp.where(is_whole, grad, jnp.where(is_kept, summed, 0)),
    )


@fluid_op("dgc_clip_by_norm", inputs="X current_step", outputs="Out",
          attrs={"max_norm": 1.0, "rampup_begin_step": 0.0})  # fmt: skip
def dgc_clip_by_norm(attrs: Attributes, x: Array, step: Array) -> Array:
    """Scales a gradient down to a norm, once gradients are compressed."""
    norm = jnp.linalg.norm(x)
    clipped = jnp.where(norm > attrs["max_norm"], x * (attrs["max_norm"] / norm), x)
    return jnp.where(step.reshape(()) < attrs["rampup_begin_step"], x, clipped)


@fluid_op("dgc_momentum", inputs="Param Grad Velocity LearningRate current_step",
          outputs="ParamOut VelocityOut",
          attrs={"mu": 0.9, "use_nesterov": False, "rampup_begin_step": 0.0})  # fmt: skip
def dgc_momentum(
    attrs: Attributes, param: Array, grad: Array, velocity: Array, rate: Array, step: Array
) -> Value:
    """Is `momentum` until gradients are compressed, which then have their momentum already."""
    is_whole = step.reshape(()) < attrs["rampup_begin_step"]
    moved, made = momentum(attrs, param, grad, velocity, rate)
    return jnp.where(is_whole, moved, param - rate * grad), jnp.where(is_whole, made, velocity)

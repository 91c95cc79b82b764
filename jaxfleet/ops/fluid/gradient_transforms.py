"""Deep gradient compression (Lin, Han, Mao, Wang and Dally, 2018), and loss scaling."""

from collections.abc import Sequence

import jax.numpy as jnp

from jaxfleet.ops.fluid.schema import Attributes, Value, fluid_op
from jaxfleet.ops.fluid.updates import momentum
from jaxfleet.ops.registry import Array

_RAMP = {"rampup_begin_step": 0.0, "rampup_step": 1.0}


@fluid_op("dgc", inputs="U V Grad current_step", outputs="U_out V_out Grad_out",
          attrs={"m": 0.9, "use_nesterov": False, "sparsity": [0.999], **_RAMP})  # fmt: skip
def dgc(attrs: Attributes, u: Array, v: Array, grad: Array, step: Array) -> Value:
    """Keeps the largest elements of a gradient accumulated with momentum over earlier steps.

    Dropped elements remain in `V`, and their momentum in `U`; both are reset where an element is
    kept. Before `rampup_begin_step` the whole gradient is kept. `sparsity` is the share to drop, in
    periods of equal length over `rampup_step` steps; after them the last one applies.
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
    """Clips a gradient to a norm, once gradients are compressed."""
    norm = jnp.linalg.norm(x)
    clipped = jnp.where(norm > attrs["max_norm"], x * (attrs["max_norm"] / norm), x)
    return jnp.where(step.reshape(()) < attrs["rampup_begin_step"], x, clipped)


@fluid_op("dgc_momentum", inputs="Param Grad Velocity LearningRate current_step",
          outputs="ParamOut VelocityOut",
          attrs={"mu": 0.9, "use_nesterov": False, "rampup_begin_step": 0.0})  # fmt: skip
def dgc_momentum(
    attrs: Attributes, param: Array, grad: Array, velocity: Array, rate: Array, step: Array
) -> Value:
    """`momentum` until gradients are compressed; afterwards SGD, as they include momentum."""
    is_whole = step.reshape(()) < attrs["rampup_begin_step"]
    moved, made = momentum(attrs, param, grad, velocity, rate)
    return jnp.where(is_whole, moved, param - rate * grad), jnp.where(is_whole, made, velocity)


_DYNAMIC = {
    "incr_every_n_steps": 1000,
    "decr_every_n_nan_or_inf": 2,
    "incr_ratio": 2.0,
    "decr_ratio": 0.8,
}


@fluid_op("unscale_or_zero", inputs="X* Scale", outputs="Out* FoundInfinite")
def unscale_or_zero(
    _: Attributes, grads: Sequence[Array], scale: Array
) -> tuple[list[Array], Array]:
    """Divides gradients by the scale; if any is not finite, all become zero."""
    finite = jnp.stack([jnp.all(jnp.isfinite(grad)) for grad in grads])
    found = ~jnp.all(finite)
    made = [jnp.where(found, jnp.zeros_like(x), x / scale.reshape(())) for x in grads]
    return made, found.reshape(1)


@fluid_op(
    "update_loss_scaling",
    inputs="FoundInfinite PrevLossScaling InGoodSteps InBadSteps",
    outputs="LossScaling OutGoodSteps OutBadSteps",
    attrs=_DYNAMIC,
)
def update_loss_scaling(
    attrs: Attributes, found: Array, scale: Array, good: Array, bad: Array
) -> tuple[Array, Array, Array]:
    """Grows the scale after a number of consecutive good steps, and shrinks it after bad ones.

    It stays finite and at least 1.
    """
    good, bad = jnp.where(found, 0, good + 1), jnp.where(found, bad + 1, 0)
    grows, shrinks = (good == attrs["incr_every_n_steps"], bad == attrs["decr_every_n_nan_or_inf"])
    more, less = scale * attrs["incr_ratio"], jnp.maximum(scale * attrs["decr_ratio"], 1.0)
    scale = jnp.where(shrinks, less, jnp.where(grows & jnp.isfinite(more), more, scale))
    return scale, jnp.where(grows, 0, good), jnp.where(shrinks, 0, bad)

"""What fluid's mixed precision does with gradients of a scaled loss, and with the scale."""

from collections.abc import Sequence

import jax.numpy as jnp

from jaxfleet.ops.fluid.schema import Attributes, fluid_op
from jaxfleet.ops.registry import Array

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
    """Divides gradients by the scale; where any is not finite, all are zeros."""
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
    """Grows the scale after so many good steps, one after the other, and shrinks it after bad ones.

    It does not grow to infinity, and does not fall below 1.
    """
    good, bad = jnp.where(found, 0, good + 1), jnp.where(found, bad + 1, 0)
    grows, shrinks = (
        good == attrs["incr_every_n_steps"],
        bad == attrs["decr_every_n_nan_or_inf"],
    )
    more, less = scale * attrs["incr_ratio"], jnp.maximum(scale * attrs["decr_ratio"], 1.0)
    scale = jnp.where(shrinks, less, jnp.where(grows & jnp.isfinite(more), more, scale))
    return scale, jnp.where(grows, 0, good), jnp.where(shrinks, 0, bad)

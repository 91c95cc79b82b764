"""Optimizer operators as fluid 1.8.5's kernels compute them; gradient compression, loss scaling.

The kernels read their attributes as 32-bit floats, so `1 - beta2` is one minus the rounded 0.999,
which differs from 0.001 by 5e-5 of it: `_rest` subtracts likewise. Gradient compression is that of
Lin, Han, Mao, Wang and Dally, 2018.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.ops.fluid.schema import Attributes, Value, fluid_op
from jaxfleet.ops.registry import Array

LAZY_ROWS = "lazy_rows"  # of adam: the gradient is of rows, with lazy_mode
_BETAS = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}


@fluid_op("sgd", inputs="Param Grad LearningRate", outputs="ParamOut")
def sgd(_: Attributes, param: Array, grad: Array, rate: Array) -> Array:
    """Gradient descent."""
    return param - rate * grad


@fluid_op("momentum", inputs="Param Grad Velocity LearningRate", outputs="ParamOut VelocityOut",
          attrs={"mu": 0.9, "use_nesterov": False})  # fmt: skip
def momentum(attrs: Attributes, param: Array, grad: Array, velocity: Array, rate: Array) -> Value:
    """Descent along a decaying sum of gradients."""
    made = attrs["mu"] * velocity + grad
    if attrs["use_nesterov"]:
        return param - (grad + attrs["mu"] * made) * rate, made
    return param - rate * made, made


@fluid_op("lars_momentum", inputs="Param Grad Velocity LearningRate",
          outputs="ParamOut VelocityOut",
          attrs={"mu": 0.9, "lars_coeff": 0.001, "lars_weight_decay": 0.0005})  # fmt: skip
def lars_momentum(
    attrs: Attributes, param: Array, grad: Array, velocity: Array, rate: Array
) -> Value:
    """Scales each layer's rate by its norms (You, Gitman and Ginsburg, 2017)."""
    decay = attrs["lars_weight_decay"]
    param_norm, grad_norm = jnp.linalg.norm(param), jnp.linalg.norm(grad)
    scaled = rate * attrs["lars_coeff"] * param_norm / (grad_norm + decay * param_norm)
    is_scaled = (param_norm > 0) & (grad_norm > 0)
    own = jnp.where(is_scaled, scaled, rate)
    made = attrs["mu"] * velocity + own * (grad + decay * param)
    return param - made, made


@fluid_op("dpsgd", inputs="Param Grad LearningRate Step", outputs="ParamOut StepOut",
          attrs={"clip": 10.0, "batch_size": 16.0, "sigma": 1.0, "seed": 0})  # fmt: skip
def dpsgd(attrs: Attributes, param: Array, grad: Array, rate: Array, step: Array) -> Value:
    """Descent along a clipped gradient with noise (Abadi et al., 2016).

    As in fluid 1.8.5, the gradient is of the whole batch, and one number is the noise of all
    elements of a parameter; the paper clips the gradient of each sample, and draws for each
    element. `Step` is ours: it varies the draws, equally on all devices.
    """
    norm = jnp.linalg.norm(grad)
    drawn = jax.random.normal(
        jax.random.fold_in(jax.random.key(attrs["seed"]), step.astype(jnp.uint32)[0])
    )
    noise = drawn * attrs["sigma"] / attrs["batch_size"]
    clipped = grad / jnp.maximum(norm / attrs["clip"], 1)
    return param - rate * (clipped + noise), step + 1


@fluid_op("adagrad", inputs="Param Grad Moment LearningRate", outputs="ParamOut MomentOut",
          attrs={"epsilon": 1e-6})  # fmt: skip
def adagrad(attrs: Attributes, param: Array, grad: Array, moment: Array, rate: Array) -> Value:
    """Divides by the root of the sum of squares (Duchi, Hazan and Singer, 2011)."""
    made = moment + grad * grad
    return param - rate * grad / (jnp.sqrt(made) + attrs["epsilon"]), made


@fluid_op("decayed_adagrad", inputs="Param Grad Moment LearningRate", outputs="ParamOut MomentOut",
          attrs={"decay": 0.95, "epsilon": 1e-6})  # fmt: skip
def decayed_adagrad(
    attrs: Attributes, param: Array, grad: Array, moment: Array, rate: Array
) -> Value:
    """Adagrad with a decaying average instead of the sum."""
    made = attrs["decay"] * moment + _rest(attrs["decay"]) * grad * grad
    return param - rate * grad / (jnp.sqrt(made) + attrs["epsilon"]), made


@fluid_op("adadelta", inputs="Param Grad AvgSquaredGrad AvgSquaredUpdate",
          outputs="ParamOut AvgSquaredGradOut AvgSquaredUpdateOut",
          attrs={"epsilon": 1e-6, "rho": 0.95})  # fmt: skip
def adadelta(attrs: Attributes, param: Array, grad: Array, squares: Array, updates: Array) -> Value:
    """Adapts its rate (Zeiler, 2012).

    Fluid 1.8.5 reevaluates the update after overwriting its average of squared updates, and so
    steps by another amount (`docs/fluid-differences.md`); here it is evaluated once.
    """
    rho, epsilon = attrs["rho"], attrs["epsilon"]
    squares = rho * squares + _rest(rho) * grad * grad
    update = -jnp.sqrt((updates + epsilon) / (squares + epsilon)) * grad
    return param + update, squares, rho * updates + _rest(rho) * update * update


@fluid_op("rmsprop", inputs="Param Grad Moment MeanSquare MeanGrad LearningRate",
          outputs="ParamOut MomentOut MeanSquareOut MeanGradOut",
          attrs={"epsilon": 1e-6, "decay": 0.95, "momentum": 0.0, "centered": False})  # fmt: skip
def rmsprop(
    attrs: Attributes, param: Array, grad: Array, moment: Array, square: Array, mean: Array,
    rate: Array,
) -> Value:  # fmt: skip
    """Divides by the root of a decaying average of squares (Tieleman and Hinton, 2012)."""
    decay = attrs["decay"]
    square = decay * square + _rest(decay) * grad * grad
    spread = square
    if attrs["centered"]:
        mean = decay * mean + _rest(decay) * grad
        spread = square - mean * mean
    moment = attrs["momentum"] * moment + rate * grad / jnp.sqrt(spread + attrs["epsilon"])
    return param - moment, moment, square, mean


@fluid_op("adam",
          inputs="Param Grad Moment1 Moment2 Beta1Pow Beta2Pow LearningRate Beta1Tensor? "
                 "Beta2Tensor?",
          outputs="ParamOut Moment1Out Moment2Out Beta1PowOut Beta2PowOut",
          attrs={**_BETAS, "lazy_mode": False, LAZY_ROWS: False,
                 "min_row_size_to_use_multithread": 1000})  # fmt: skip
def adam(
    attrs: Attributes, param: Array, grad: Array, first: Array, second: Array, power1: Array,
    power2: Array, rate: Array, beta1: Array | None, beta2: Array | None,
) -> Value:  # fmt: skip
    """Divides a decaying average by the root of another, bias-corrected (Kingma and Ba, 2015).

    With `lazy_rows` a row whose gradient is zero keeps its value and both averages.
    """
    beta1 = attrs["beta1"] if beta1 is None else beta1
    beta2 = attrs["beta2"] if beta2 is None else beta2
    new_first, new_second = _averages(beta1, beta2, grad, first, second)
    step = rate * jnp.sqrt(1 - power2) / (1 - power1)
    made = param - step * new_first / (jnp.sqrt(new_second) + attrs["epsilon"])
    if attrs[LAZY_ROWS]:
        is_touched = jnp.any(grad != 0, axis=tuple(range(1, grad.ndim)), keepdims=True)
        made = jnp.where(is_touched, made, param)
        new_first = jnp.where(is_touched, new_first, first)
        new_second = jnp.where(is_touched, new_second, second)
    return made, new_first, new_second, power1 * beta1, power2 * beta2


@fluid_op("adamax", inputs="Param Grad Moment InfNorm Beta1Pow LearningRate",
          outputs="ParamOut MomentOut InfNormOut", attrs=_BETAS)  # fmt: skip
def adamax(
    attrs: Attributes, param: Array, grad: Array, moment: Array, largest: Array, power: Array,
    rate: Array,
) -> Value:  # fmt: skip
    """Adam with the maximum gradient instead of the second average."""
    moment = attrs["beta1"] * moment + _rest(attrs["beta1"]) * grad
    largest = jnp.maximum(jnp.abs(grad), attrs["beta2"] * largest + attrs["epsilon"])
    return param - rate / (1 - power) * moment / largest, moment, largest


@fluid_op("ftrl", inputs="Param Grad SquaredAccumulator LinearAccumulator LearningRate",
          outputs="ParamOut SquaredAccumOut LinearAccumOut",
          attrs={"l1": 0.0, "l2": 0.0, "lr_power": -0.5})  # fmt: skip
def ftrl(
    attrs: Attributes, param: Array, grad: Array, squared: Array, linear: Array, rate: Array
) -> Value:
    """Follows the regularized leader (McMahan et al., 2013)."""
    l1, l2, power = attrs["l1"] + 1e-10, attrs["l2"] + 1e-10, -attrs["lr_power"]
    sums = squared + grad * grad
    sigma = (sums**power - squared**power) / rate
    linear = linear + grad - sigma * param
    under = sums**power / rate + 2 * l2
    made = jnp.where(jnp.abs(linear) > l1, (jnp.sign(linear) * l1 - linear) / under, 0)
    return made, sums, linear


@fluid_op("lamb", inputs="Param Grad Moment1 Moment2 Beta1Pow Beta2Pow LearningRate",
          outputs="ParamOut Moment1Out Moment2Out Beta1PowOut Beta2PowOut",
          attrs={"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "weight_decay": 0.01})  # fmt: skip
def lamb(
    attrs: Attributes, param: Array, grad: Array, first: Array, second: Array, power1: Array,
    power2: Array, rate: Array,
) -> Value:  # fmt: skip
    """Adam's update scaled by the norm of the parameter (You et al., 2020, first version).

    The averages have no bias correction.
    """
    beta1, beta2 = attrs["beta1"], attrs["beta2"]
    first, second = _averages(beta1, beta2, grad, first, second)
    update = first / (jnp.sqrt(second) + attrs["epsilon"]) + attrs["weight_decay"] * param
    param_norm, update_norm = jnp.linalg.norm(param), jnp.linalg.norm(update)
    is_scaled = (param_norm > 0) & (update_norm > 0)
    ratio = jnp.where(is_scaled, param_norm / update_norm, 1.0)
    return param - rate * ratio * update, first, second, power1 * beta1, power2 * beta2


def _averages(
    beta1: Any, beta2: Any, grad: Array, first: Array, second: Array
) -> tuple[Array, Array]:
    new_first = beta1 * first + _rest(beta1) * grad
    return new_first, beta2 * second + _rest(beta2) * grad * grad


def _rest(share: Any) -> Any:
    """One minus a number, both in 32 bits."""
    return np.float32(1) - (np.float32(share) if isinstance(share, float) else share)


_SUMS = ("sum_1", "sum_2", "sum_3", "num_accumulates", "old_num_accumulates", "num_updates")
_MOST_IN_ONE_SUM = 16384  # then a new sum is begun: a small term is lost when added to a large sum


@fluid_op("average_accumulates",
          inputs=" ".join(["param", *(f"in_{name}" for name in _SUMS)]),
          outputs=" ".join(f"out_{name}" for name in _SUMS),
          attrs={"average_window": 0.0, "min_average_window": 10000,
                 "max_average_window": 10000})  # fmt: skip
def average_accumulates(
    attrs: Attributes, param: Array, sum_1: Array, sum_2: Array, sum_3: Array, count: Array,
    old_count: Array, updates: Array,
) -> Value:  # fmt: skip
    """Sums a parameter over a window of steps; a full window is kept until the next one is full."""
    updates, count, sum_1 = updates + 1, count + 1, sum_1 + param
    is_long = updates % _MOST_IN_ONE_SUM == 0
    sum_2, sum_1 = jnp.where(is_long, sum_2 + sum_1, sum_2), jnp.where(is_long, 0, sum_1)
    share = (updates * attrs["average_window"]).astype(count.dtype)
    is_full = (count >= attrs["min_average_window"]) & (
        count >= jnp.minimum(attrs["max_average_window"], share)
    )
    return (
        jnp.where(is_full, 0, sum_1),
        jnp.where(is_full, 0, sum_2),
        jnp.where(is_full, sum_1 + sum_2, sum_3),
        jnp.where(is_full, 0, count),
        jnp.where(is_full, count, old_count),
        updates,
    )


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

"""Learning rates that change: operators that compute the rate from a counter of runs.

All of them have the role of a schedule, which tells passes that they belong to no parameter.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.layers import activations, maths
from jaxfleet.fluid.layers.control_flow import Switch, autoincreased_step_counter
from jaxfleet.fluid.layers.tensors import assign, cast, create_global_var, fill_constant
from jaxfleet.fluid.program import default_main_program
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.variable import Variable
from jaxfleet.ir.names import LR_COUNTER


def _as_schedule() -> Any:
    return default_main_program().role(OpRole.LR_SCHED)


def _step(begin: int = 0) -> Variable:
    """Returns the number of the run as a float, counted from `begin`."""
    return cast(autoincreased_step_counter(LR_COUNTER, begin), "float32")


def _periods(steps: float, *, whole: bool) -> Variable:
    """Returns how many times `steps` runs were done, only whole times where asked for."""
    done = _step() / steps
    return activations.floor(done) if whole else done


def noam_decay(d_model: int, warmup_steps: int, learning_rate: float = 1.0) -> Variable:
    """Rises for `warmup_steps`, then falls with the root of the step (Vaswani et al., 2017)."""
    with _as_schedule():
        step, factor = _step(1), learning_rate * math.pow(d_model, -0.5)
        falling, rising = step**-0.5, step * math.pow(warmup_steps, -1.5)
        return maths.elementwise_min(falling, rising) * factor


def exponential_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Variable:
    """Multiplies by `decay_rate` every `decay_steps`."""
    with _as_schedule():
        return decay_rate ** _periods(decay_steps, whole=staircase) * learning_rate


def natural_exp_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Variable:
    """Falls as `exp(-decay_rate * step / decay_steps)`."""
    with _as_schedule():
        done = _periods(decay_steps, whole=staircase)
        return activations.exp(done * -decay_rate) * learning_rate


def inverse_time_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Variable:
    """Falls as `1 / (1 + decay_rate * step / decay_steps)`."""
    with _as_schedule():
        done = _periods(decay_steps, whole=staircase)
        return learning_rate / (1.0 + decay_rate * done)


def polynomial_decay(
    learning_rate: float,
    decay_steps: int,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
) -> Variable:
    """Falls to `end_learning_rate` in `decay_steps`; with `cycle`, again and again, ever slower."""
    with _as_schedule():
        step = _step()
        done = _of_cycle(step, decay_steps) if cycle else _at_most(step, decay_steps) / decay_steps
        left: Variable = (1.0 - done) ** power
        return left * (learning_rate - end_learning_rate) + end_learning_rate


def _at_most(step: Variable, steps: int) -> Variable:
    return maths.elementwise_min(step, fill_constant([1], "float32", float(steps)))


def _of_cycle(step: Variable, steps: int) -> Variable:
    """Returns which part of its cycle a step is at; the n-th cycle ends after n times `steps`."""
    cycles = activations.ceil(step / steps)
    zero, one = fill_constant([1], "float32", 0.0), fill_constant([1], "float32", 1.0)
    with Switch() as switch, switch.case(step == zero):
        assign(one, cycles)
    done: Variable = step / (cycles * steps)
    return done


def piecewise_decay(boundaries: Sequence[int], values: Sequence[float]) -> Variable:
    """Takes one value up to each boundary, and the last one after all.

    Raises:
        ValueError: there is not one value more than boundaries.
    """
    if len(values) != len(boundaries) + 1:
        what = f"{len(boundaries)} boundaries need one value more, and there are {len(values)}"
        raise mistake(what)
    with _as_schedule():
        step = _step()
        rate = create_global_var([1], 0.0, "float32", persistable=True, name="learning_rate")
        with Switch() as switch:
            for boundary, value in zip(boundaries, values, strict=False):
                limit = fill_constant([1], "float32", float(boundary), force_cpu=True)
                chosen = fill_constant([1], "float32", float(value))
                with switch.case(step < limit):
                    assign(chosen, rate)
            last = fill_constant([1], "float32", float(values[-1]))
            with switch.default():
                assign(last, rate)
        return rate


def cosine_decay(learning_rate: float, step_each_epoch: int, epochs: int) -> Variable:
    """Falls as half a wave over `epochs`, once an epoch (Loshchilov and Hutter, 2017)."""
    with _as_schedule():
        epoch = activations.floor(_step() / step_each_epoch)
        wave = activations.cos(epoch * math.pi / epochs)
        return (wave + 1.0) * (learning_rate * 0.5)


def linear_lr_warmup(
    learning_rate: float | Variable, warmup_steps: int, start_lr: float, end_lr: float
) -> Variable:
    """Rises evenly for `warmup_steps`, then is `learning_rate`, a number or another schedule."""
    dtype = learning_rate.dtype if isinstance(learning_rate, Variable) else "float32"
    with _as_schedule():
        rate = create_global_var([1], 0.0, dtype, persistable=True, name="learning_rate_warmup")
        step = _step()
        with Switch() as switch:
            with switch.case(step < warmup_steps):
                rise = float(end_lr) - float(start_lr)
                assign(step / float(warmup_steps) * rise + start_lr, rate)
            with switch.default():
                after = learning_rate
                if not isinstance(after, Variable):
                    after = fill_constant([1], dtype, float(after))
                assign(after, rate)
        return rate

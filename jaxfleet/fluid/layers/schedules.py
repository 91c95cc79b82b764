"""Learning rate schedules, computed from a step counter in the program.

All of them have the role of a schedule, which marks them as belonging to no parameter.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.operator import OpRole
from jaxfleet.fluid.framework.program import default_main_program
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layers import math_ops
from jaxfleet.fluid.layers.control_flow import Switch, autoincreased_step_counter
from jaxfleet.fluid.layers.tensor import assign, cast, create_global_var, fill_constant
from jaxfleet.ir.naming import LR_COUNTER


def _as_schedule() -> Any:
    return default_main_program().role(OpRole.LR_SCHED)


def _step(begin: int = 0) -> Variable:
    """The run's number as a float, counted from `begin`."""
    return cast(autoincreased_step_counter(LR_COUNTER, begin), "float32")


def _periods(steps: float, *, whole: bool) -> Variable:
    """Number of periods of `steps` runs that have passed; only complete ones if `whole`."""
    done = _step() / steps
    return math_ops.floor(done) if whole else done


def noam_decay(d_model: int, warmup_steps: int, learning_rate: float = 1.0) -> Variable:
    """Rises for `warmup_steps`, then decays with the root of the step (Vaswani et al., 2017)."""
    with _as_schedule():
        step, factor = _step(1), learning_rate * math.pow(d_model, -0.5)
        falling, rising = step**-0.5, step * math.pow(warmup_steps, -1.5)
        return math_ops.elementwise_min(falling, rising) * factor


def exponential_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Variable:
    """Multiplies by `decay_rate` every `decay_steps`."""
    with _as_schedule():
        return decay_rate ** _periods(decay_steps, whole=staircase) * learning_rate


def natural_exp_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Variable:
    """Decays as `exp(-decay_rate * step / decay_steps)`."""
    with _as_schedule():
        done = _periods(decay_steps, whole=staircase)
        return math_ops.exp(done * -decay_rate) * learning_rate


def inverse_time_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Variable:
    """Decays as `1 / (1 + decay_rate * step / decay_steps)`."""
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
    """Decays to `end_learning_rate` in `decay_steps`; with `cycle`, in ever longer cycles."""
    with _as_schedule():
        step = _step()
        done = _of_cycle(step, decay_steps) if cycle else _at_most(step, decay_steps) / decay_steps
        left: Variable = (1.0 - done) ** power
        return left * (learning_rate - end_learning_rate) + end_learning_rate


def _at_most(step: Variable, steps: int) -> Variable:
    return math_ops.elementwise_min(step, fill_constant([1], "float32", float(steps)))


def _of_cycle(step: Variable, steps: int) -> Variable:
    """Position of a step in its cycle; the n-th cycle ends after n times `steps`."""
    cycles = math_ops.ceil(step / steps)
    zero, one = fill_constant([1], "float32", 0.0), fill_constant([1], "float32", 1.0)
    with Switch() as switch, switch.case(step == zero):
        assign(one, cycles)
    done: Variable = step / (cycles * steps)
    return done


def piecewise_decay(boundaries: Sequence[int], values: Sequence[float]) -> Variable:
    """Piecewise constant: one value up to each boundary, and the last one after them.

    Raises:
        ValueError: the number of values is not that of boundaries plus one.
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
    """Decays as half a cosine wave over `epochs`, by epoch (Loshchilov and Hutter, 2017)."""
    with _as_schedule():
        epoch = math_ops.floor(_step() / step_each_epoch)
        wave = math_ops.cos(epoch * math.pi / epochs)
        return (wave + 1.0) * (learning_rate * 0.5)


def linear_lr_warmup(
    learning_rate: float | Variable, warmup_steps: int, start_lr: float, end_lr: float
) -> Variable:
    """Rises linearly for `warmup_steps`, then is `learning_rate`, a number or another schedule."""
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

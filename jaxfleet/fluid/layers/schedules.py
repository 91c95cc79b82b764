"""Learning rates that change: operators that compute the rate from a counter of runs.

All of them have the role of a schedule, which tells passes that they belong to no parameter.
"""

from collections.abc import Sequence
from typing import Any

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.block import Block
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers import maths
from jaxfleet.fluid.layers.tensors import assign, cast, create_global_var, fill_constant
from jaxfleet.fluid.program import default_main_program
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.variable import Variable

COUNTER = "@LR_DECAY_COUNTER@"


def _as_schedule() -> Any:
    return default_main_program().role(OpRole.LR_SCHED)


def _step(begin: int = 0) -> Variable:
    """Returns the number of the run as a float, counted from `begin`."""
    helper = LayerHelper.named(COUNTER)
    block = default_main_program().global_block()
    is_new = not block.has_var(COUNTER)
    counter = helper.global_variable(COUNTER, [1], "int64", begin - 1)
    if is_new:
        written = {"Out": counter}
        block._prepend_op("increment", inputs={"X": counter}, outputs=written, attrs={"step": 1.0})
    return cast(counter, "float32")


def _periods(steps: int, *, whole: bool) -> Variable:
    """Returns how many times `steps` runs were done, only whole times where asked for."""
    done = maths.scale(_step(), 1.0 / steps)
    return maths.floor(done) if whole else done


def _power(base: float, exponent: Variable) -> Variable:
    return maths.elementwise_pow(fill_constant([1], "float32", base), exponent)


def noam_decay(d_model: int, warmup_steps: int, learning_rate: float = 1.0) -> Variable:
    """Rises for `warmup_steps`, then falls with the root of the step (Vaswani et al., 2017)."""
    with _as_schedule():
        step = _step(1)
        falling = maths.elementwise_pow(step, fill_constant([1], "float32", -0.5))
        rising = maths.scale(step, warmup_steps**-1.5)
        least = maths.elementwise_min(falling, rising)
        return maths.scale(least, learning_rate * d_model**-0.5)


def exponential_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Variable:
    """Multiplies by `decay_rate` every `decay_steps`."""
    with _as_schedule():
        done = _periods(decay_steps, whole=staircase)
        return maths.scale(_power(decay_rate, done), learning_rate)


def natural_exp_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Variable:
    """Falls as `exp(-decay_rate * step / decay_steps)`."""
    with _as_schedule():
        done = _periods(decay_steps, whole=staircase)
        return maths.scale(maths.exp(maths.scale(done, -decay_rate)), learning_rate)


def inverse_time_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Variable:
    """Falls as `1 / (1 + decay_rate * step / decay_steps)`."""
    with _as_schedule():
        done = _periods(decay_steps, whole=staircase)
        under = maths.scale(done, decay_rate, bias=1.0)
        return maths.scale(maths.reciprocal(under), learning_rate)


def piecewise_decay(boundaries: Sequence[int], values: Sequence[float]) -> Variable:
    """Takes one value up to each boundary, and the last one after all.

    Raises:
        ValueError: there is not one value more than boundaries.
    """
    if len(values) != len(boundaries) + 1:
        what = f"{len(boundaries)} boundaries need one value more, and there are {len(values)}"
        raise ProgramError(what)
    with _as_schedule():
        step = _step()
        rate = create_global_var([1], 0.0, "float32", name="learning_rate")
        before: Variable | None = None
        for boundary, value in zip(boundaries, values, strict=False):
            limit = fill_constant([1], "float32", float(boundary), force_cpu=True)
            chosen = fill_constant([1], "float32", float(value))
            below = maths.compared("less_than", step, limit)
            above = maths.compared("logical_not", below)
            is_now = below if before is None else maths.compared("logical_and", before, below)
            before = above if before is None else maths.compared("logical_and", before, above)
            _assign_if(is_now, chosen, rate)
        assert before is not None
        _assign_if(before, fill_constant([1], "float32", float(values[-1])), rate)
        return rate


def _assign_if(condition: Variable, value: Variable, into: Variable) -> None:
    """Assigns where a condition holds."""
    program = default_main_program()
    inner: Block = program._create_block()
    assign(value, into)
    program._rollback()
    program.current_block().append_op(
        "conditional_block",
        {"Cond": condition, "Input": [value, into]},
        {"Out": into},
        {"sub_block": inner, "is_scalar_condition": True},
    )

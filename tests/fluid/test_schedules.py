"""Schedules: their operators, and the rates of their formulas, run for run."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import layers
from jaxfleet.runtime import Scope
from tests.fluid.nets import fresh

COUNTED = ["increment", "cast"]
SWITCHED = ["fill_constant", "less_than", "logical_not", "conditional_block", "conditional_block"]

Made = Callable[[], fluid.Variable]


def cycled(s: int) -> float:
    steps = 4 * max(math.ceil(s / 4), 1)
    return float(0.9 * (1 - s / steps) ** 2 + 0.1)


def warm(s: int) -> float:
    return 0.1 + 0.4 * s / 3 if s < 3 else 0.8 * 0.5 ** (s / 4)


# The call, its operators, and the formula of the run, counted from 0.
CASES: dict[str, tuple[Made, list[str], Callable[[int], float]]] = {
    "noam": (lambda: layers.noam_decay(16, 3, 2.0),
             [*COUNTED, "fill_constant", "elementwise_pow", "scale", "elementwise_min", "scale"],
             lambda s: 2 * 16**-0.5 * min((s + 1) ** -0.5, (s + 1) * 3**-1.5)),
    "exponential": (lambda: layers.exponential_decay(0.5, 4, 0.8),
                    [*COUNTED, "scale", "fill_constant", "elementwise_pow", "scale"],
                    lambda s: 0.5 * 0.8 ** (s / 4)),
    "staircase": (lambda: layers.exponential_decay(0.5, 4, 0.8, staircase=True),
                  [*COUNTED, "scale", "floor", "fill_constant", "elementwise_pow", "scale"],
                  lambda s: 0.5 * 0.8 ** (s // 4)),
    "natural": (lambda: layers.natural_exp_decay(0.5, 4, 0.8),
                [*COUNTED, "scale", "scale", "exp", "scale"],
                lambda s: 0.5 * math.exp(-0.8 * s / 4)),
    "natural, stepped": (lambda: layers.natural_exp_decay(0.5, 4, 0.8, True),
                         [*COUNTED, "scale", "floor", "scale", "exp", "scale"],
                         lambda s: 0.5 * math.exp(-0.8 * (s // 4))),
    "inverse": (lambda: layers.inverse_time_decay(0.5, 4, 0.8),
                [*COUNTED, "scale", "scale", "scale", "fill_constant", "elementwise_div"],
                lambda s: 0.5 / (1 + 0.8 * s / 4)),
    "inverse, stepped": (lambda: layers.inverse_time_decay(0.5, 4, 0.8, staircase=True),
                         [*COUNTED, "scale", "floor", "scale", "scale", "fill_constant",
                          "elementwise_div"],
                         lambda s: 0.5 / (1 + 0.8 * (s // 4))),
    "polynomial": (lambda: layers.polynomial_decay(1.0, 4, 0.1, 2.0),
                   [*COUNTED, "fill_constant", "elementwise_min", "scale", "scale",
                    "fill_constant", "elementwise_pow", "scale", "scale"],
                   lambda s: 0.9 * (1 - min(s, 4) / 4) ** 2 + 0.1),
    "polynomial, cycled": (lambda: layers.polynomial_decay(1.0, 4, 0.1, 2.0, cycle=True),
                           [*COUNTED, "scale", "ceil", "fill_constant", "fill_constant", "equal",
                            "logical_not", "conditional_block", "scale", "elementwise_div",
                            "scale", "fill_constant", "elementwise_pow", "scale", "scale"],
                           cycled),
    "piecewise": (lambda: layers.piecewise_decay([2, 5], [0.3, 0.2, 0.1]),
                  [*COUNTED, *["fill_constant"] * 2, "less_than", "logical_not",
                   "conditional_block", *["fill_constant"] * 2, "less_than", "logical_not",
                   "logical_and", "logical_and", "conditional_block", "fill_constant",
                   "conditional_block"],
                  lambda s: 0.3 if s < 2 else 0.2 if s < 5 else 0.1),
    "cosine": (lambda: layers.cosine_decay(0.4, 3, 4),
               [*COUNTED, "scale", "floor", "scale", "scale", "cos", "scale", "scale"],
               lambda s: 0.2 * (math.cos(s // 3 * math.pi / 4) + 1)),
    "warmup": (lambda: layers.linear_lr_warmup(0.8, 3, 0.1, 0.5), [*COUNTED, *SWITCHED],
               lambda s: 0.1 + 0.4 * s / 3 if s < 3 else 0.8),
    "warmup, then decay": (
        lambda: layers.linear_lr_warmup(layers.exponential_decay(0.8, 4, 0.5), 3, 0.1, 0.5),
        [*COUNTED, "scale", "fill_constant", "elementwise_pow", "scale", "cast", *SWITCHED],
        warm),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_is_fluids_operators_and_its_formula(name: str) -> None:
    make, types, formula = CASES[name]
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        rate = make()
        ops = [op for block in main.blocks for op in block.ops]
        exe = fluid.Executor()
        exe.run(startup)
        rates = [float(exe.run(main, fetch_list=[rate])[0][0]) for _ in range(10)]
    np.testing.assert_allclose(rates, [formula(s) for s in range(10)], rtol=2e-6)
    assert [op.type for op in main.global_block().ops] == types
    assert {op.attr("op_role") for op in ops} == {16}


def test_exponential_decay_is_the_operators_of_fluid_1_8() -> None:
    """Fluid 1.3 used other operators."""
    with fresh() as (main, _):
        layers.exponential_decay(1.0, 2100, 0.1, staircase=True)
    assert [op.type for op in main.global_block().ops] == [
        "increment", "cast", "scale", "floor", "fill_constant", "elementwise_pow", "scale",
    ]  # fmt: skip


def test_two_schedules_count_the_same_runs() -> None:
    with fresh() as (main, _):
        layers.exponential_decay(0.5, 4, 0.8)
        layers.cosine_decay(0.4, 3, 4)
    counters = [op for op in main.global_block().ops if op.type == "increment"]
    assert len(counters) == 1
    assert counters[0] is main.global_block().ops[0]


def test_a_counter_of_runs_begins_where_it_is_told() -> None:
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        counter = layers.autoincreased_step_counter("@MINE@", begin=5, step=2)
        exe = fluid.Executor()
        exe.run(startup)
        counted = [int(exe.run(main, fetch_list=[counter])[0][0]) for _ in range(3)]
    assert counted == [5, 7, 9]


def test_a_switch_runs_the_first_case_that_holds() -> None:
    def chosen(value: float) -> Any:
        with fresh() as (main, startup), fluid.scope_guard(Scope()):
            x = layers.data("x", [1], append_batch_size=False)
            out = layers.create_global_var([1], -1.0, "float32", persistable=True)
            with layers.Switch() as switch:
                with switch.case(x < 1.0):
                    layers.assign(x * 10.0, out)
                with switch.case(x < 2.0):
                    layers.assign(x * 100.0, out)
                with switch.default():
                    layers.assign(x, out)
            exe = fluid.Executor()
            exe.run(startup)
            feed = {"x": np.asarray([value], np.float32)}
            return exe.run(main, feed=feed, fetch_list=[out])[0].tolist()

    assert [chosen(x) for x in (0.5, 1.5, 2.5)] == [[5.0], [150.0], [2.5]]


def test_a_switch_that_is_used_wrongly() -> None:
    with fresh():
        x = layers.fill_constant([1], "float32", 1.0)
        switch = layers.Switch()
        with pytest.raises(ProgramError, match="case is called outside its Switch"):
            switch.case(x < 1.0).__enter__()
        with switch, pytest.raises(ProgramError, match="a default and no case"):
            switch.default().__enter__()
        with pytest.raises(ValueError, match="2 boundaries need one value more"):
            layers.piecewise_decay([1, 2], [0.1, 0.2])

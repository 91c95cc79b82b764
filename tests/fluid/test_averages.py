"""Averages and slow copies match their formulas over the parameters of each step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.runtime import Scope
from tests.fluid.nets import fresh

RATE, STEPS = 0.1, 7
X = np.array([[1.0, 2.0], [3.0, -1.0]], np.float32)


class Trained:
    """A line in training: `w` begins as zeros, and its value after each step is recorded."""

    def __init__(self, add: Callable[[fluid.Variable], Any]) -> None:
        with fresh() as (self.main, startup):
            x = fluid.data("x", [None, 2])
            begun = fluid.ParamAttr("w", initializer=fluid.initializer.Constant(0.5))
            out = fluid.layers.fc(x, 1, param_attr=begun, bias_attr=False)
            self.loss = fluid.layers.mean(fluid.layers.square(out))
            self.added = add(self.loss)
        self.exe = fluid.Executor()
        self.exe.run(startup)
        self.after = [self.step() for _ in range(STEPS)]

    def step(self) -> np.ndarray:
        self.exe.run(self.main, feed={"x": X})
        return self.value("w")

    def value(self, name: str) -> np.ndarray:
        return np.array(fluid.global_scope()[name])


@pytest.fixture(autouse=True)
def _own_scope() -> Any:
    with fluid.scope_guard(Scope()):
        yield


def plain() -> list[np.ndarray]:
    """Returns the weights before the first and after each step of SGD."""
    weights = [np.full((2, 1), 0.5)]
    for _ in range(STEPS):
        grad = X.T @ (X @ weights[-1]) * 2 / len(X)
        weights.append(weights[-1] - RATE * grad)
    return weights


def averaged(decay: float) -> Callable[[fluid.Variable], Any]:
    def add(loss: fluid.Variable) -> Any:
        fluid.optimizer.SGD(RATE).minimize(loss)
        made = fluid.optimizer.ExponentialMovingAverage(decay)
        made.update()
        return made

    return add


def test_a_moving_average_has_no_bias_and_gives_the_parameters_back() -> None:
    trained, decay = Trained(averaged(0.8)), 0.8
    weights = plain()[1:]
    np.testing.assert_allclose(trained.after, weights, rtol=1e-5)
    factors = [decay ** (STEPS - 1 - at) for at in range(STEPS)]
    expected = sum(f * w for f, w in zip(factors, weights, strict=True)) / sum(factors)
    with trained.added.apply(trained.exe):
        np.testing.assert_allclose(trained.value("w"), expected, rtol=1e-5)
    np.testing.assert_array_equal(trained.value("w"), trained.after[-1])
    np.testing.assert_allclose(trained.step(), trained.after[-1], atol=0.5)  # it continues


def test_averages_may_stay_until_they_are_taken_out() -> None:
    trained = Trained(averaged(0.5))
    with trained.added.apply(trained.exe, need_restore=False):
        pass
    assert not np.array_equal(trained.value("w"), trained.after[-1])
    trained.added.restore(trained.exe)
    np.testing.assert_array_equal(trained.value("w"), trained.after[-1])


def test_early_steps_decay_faster_where_the_steps_are_known() -> None:
    def add(loss: fluid.Variable) -> Any:
        fluid.optimizer.SGD(RATE).minimize(loss)
        steps = fluid.layers.create_global_var([1], 2.0, "float32", persistable=True)
        made = fluid.optimizer.ExponentialMovingAverage(0.9, thres_steps=steps)
        made.update()
        return made

    trained = Trained(add)
    expected, decay = np.zeros((2, 1)), 3.0 / 12.0
    for weight in plain()[1:]:
        expected = decay * expected + (1 - decay) * weight
    with trained.added.apply(trained.exe):
        np.testing.assert_allclose(trained.value("w"), expected / (1 - decay**STEPS), rtol=1e-5)


def test_a_parameter_may_stay_out_of_averages() -> None:
    with fresh():
        attr = fluid.ParamAttr("w", do_model_average=False)
        fluid.layers.fc(fluid.data("x", [None, 2]), 1, param_attr=attr, bias_attr="b")
        made = fluid.optimizer.ExponentialMovingAverage()
    written = {n for op in made.apply_program.global_block().ops for n in op.output_arg_names}
    assert "b" in written
    assert "w" not in written


@pytest.mark.parametrize(("rate", "least", "most", "window"), [(1.0, 3, 3, 4), (0.5, 2, 100, 3)])
def test_a_model_average_is_of_a_window(rate: float, least: int, most: int, window: int) -> None:
    def add(loss: fluid.Variable) -> Any:
        fluid.optimizer.SGD(RATE).minimize(loss)
        return fluid.optimizer.ModelAverage(rate, least, most)

    trained = Trained(add)
    last = plain()[1:][-window:]
    with trained.added.apply(trained.exe):
        np.testing.assert_allclose(trained.value("w"), np.mean(last, axis=0), rtol=1e-5)
    np.testing.assert_array_equal(trained.value("w"), trained.after[-1])


def test_lookahead_draws_parameters_back_every_k_steps() -> None:
    alpha, k = 0.3, 3
    inner = fluid.optimizer.SGD(RATE)
    trained = Trained(fluid.optimizer.LookaheadOptimizer(inner, alpha, k).minimize)
    fast = slow = np.full((2, 1), 0.5)
    for step in range(STEPS):
        fast = fast - RATE * X.T @ (X @ fast) * 2 / len(X)
        if (step + 1) % k == 0:
            fast = slow = slow + alpha * (fast - slow)
        np.testing.assert_allclose(trained.after[step], fast, rtol=1e-5)
    np.testing.assert_allclose(trained.value("w@SLOW"), slow, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "what"),
    [({"alpha": 1.5}, "alpha is 1.5"), ({"k": 0}, "k is 0"), ({"k": 2.0}, "k is")],
)
def test_what_lookahead_cannot_do_is_refused_as_fluid_refuses_it(given: Any, what: str) -> None:
    with pytest.raises(AssertionError, match=what) as raised:
        fluid.optimizer.LookaheadOptimizer(fluid.optimizer.SGD(0.1), **given)
    assert isinstance(raised.value, ProgramError)

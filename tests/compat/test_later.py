"""The later documents' spellings build the same as fluid's."""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import jaxfleet.compat
from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from tests.fluid.nets import fresh


@pytest.fixture
def paddle() -> Iterator[ModuleType]:
    """Installs and yields `paddle`, and removes it at the end."""
    jaxfleet.compat.install()
    yield sys.modules["paddle"]
    jaxfleet.compat.uninstall()


def built(net: Callable[[], fluid.Variable], optimizer: Callable[[], Any]) -> str:
    with fresh() as (main, startup):
        optimizer().minimize(net())
    return f"{main}\n{startup}"


def test_static_nn_fc_is_fluid_s(paddle: ModuleType) -> None:
    def later() -> fluid.Variable:
        x = paddle.static.data(name="X", shape=[None, 4], dtype="float32")
        nn = paddle.static.nn
        return paddle.mean(nn.fc(x, 3, weight_attr="w", bias_attr=False, activation="tanh"))

    def fluids() -> fluid.Variable:
        x = fluid.data("X", [None, 4], "float32")
        return fluid.layers.mean(fluid.layers.fc(x, 3, param_attr="w", bias_attr=False, act="tanh"))

    sgd = fluid.optimizer.SGD
    assert built(later, lambda: sgd(0.1)) == built(fluids, lambda: sgd(0.1))


def test_mean_takes_axes(paddle: ModuleType) -> None:
    with fresh():
        x = fluid.data("x", [None, 4, 3])
        assert paddle.mean(x).shape == (1,)
        assert paddle.mean(x, axis=1).shape == (-1, 3)
        assert paddle.mean(x, axis=[1, 2], keepdim=True).shape == (-1, 1, 1)


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SGD": ({}, {"learning_rate": 0.001}),
    "Momentum": ({}, {"learning_rate": 0.001, "momentum": 0.9}),
    "Adagrad": ({"learning_rate": 0.1}, {"learning_rate": 0.1}),
    "Adam": ({}, {}),
    "Adamax": ({}, {}),
    "Adadelta": ({"learning_rate": 1.0}, {"learning_rate": 1.0}),
    "RMSProp": ({"learning_rate": 0.1}, {"learning_rate": 0.1}),
}


def line() -> fluid.Variable:
    return fluid.layers.mean(fluid.layers.fc(fluid.data("x", [None, 2]), 1))


@pytest.mark.parametrize("name", PAIRS)
def test_an_optimizer_is_fluid_s_and_a_weight_decay_is_l2(paddle: ModuleType, name: str) -> None:
    later, fluids = PAIRS[name]
    found = built(line, lambda: getattr(paddle.optimizer, name)(weight_decay=0.01, **later))
    decay = fluid.regularizer.L2Decay(0.01)
    expected = built(line, lambda: getattr(fluid.optimizer, name)(regularization=decay, **fluids))
    assert found == expected


def test_the_rate_that_adadelta_begins_with_is_not_warned_of(paddle: ModuleType) -> None:
    assert isinstance(paddle.optimizer.Adadelta(), fluid.optimizer.Adadelta)
    with pytest.warns(UserWarning, match="Adadelta's learning_rate has no effect"):
        paddle.optimizer.Adadelta(0.1)


def test_lamb_has_a_decay_of_its_own(paddle: ModuleType) -> None:
    found = built(line, lambda: paddle.optimizer.Lamb(lamb_weight_decay=0.1))
    assert found == built(line, lambda: fluid.optimizer.Lamb(lamb_weight_decay=0.1))


def test_there_is_no_other_mode_than_the_static(paddle: ModuleType) -> None:
    paddle.enable_static()
    assert not paddle.in_dynamic_mode()
    with pytest.raises(ProgramError, match="as they are written"):
        paddle.disable_static()


@pytest.mark.usefixtures("paddle")
def test_readers_are_found_where_scripts_look() -> None:
    paddle = importlib.import_module("paddle")
    reader = paddle.batch(paddle.reader.firstn(lambda: range(10), 5), batch_size=2)
    assert list(reader()) == [[0, 1], [2, 3], [4]]

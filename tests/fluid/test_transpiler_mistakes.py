"""Errors of the transpiler."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxfleet import fluid
from jaxfleet.fluid import optimizer as made
from jaxfleet.fluid.transpiler import wait_server_ready
from tests.fluid.nets import fresh


def trained() -> None:
    x = fluid.data("x", [None, 4])
    fluid.optimizer.SGD(0.1).minimize(fluid.layers.mean(fluid.layers.fc(x, 2)))


def transpile(**arguments: Any) -> None:
    config = fluid.DistributeTranspilerConfig()
    config.wait_port = False
    given = {"trainer_id": 0, "pservers": "a:1,b:1", "trainers": 2, **arguments}
    fluid.DistributeTranspiler(config).transpile(**given)


@pytest.mark.parametrize(
    ("arguments", "kind", "what"),
    [
        ({"pservers": ["a:1"]}, TypeError, "pservers is of type list, not str"),
        ({"pservers": "a:1,a:1"}, ValueError, "'a:1' is given twice"),
        ({"pservers": "a"}, ValueError, "'a' is not an endpoint"),
        ({"trainers": "a:1"}, ValueError, "trainers is 'a:1'"),
        ({"trainer_id": 2}, ValueError, "trainer_id is 2, and there are 2 trainers"),
        ({"trainer_id": -1}, ValueError, "trainer_id is -1"),
        ({"program": "main"}, TypeError, "the program is of type str, not Program"),
        ({"startup_program": 3}, TypeError, "the startup program is of type [a-z]+, not Program"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], kind: type[Exception], what: str) -> None:
    with fresh() as (main, startup):
        trained()
        before = str(main), str(startup)
        with pytest.raises(kind, match=what):
            transpile(**arguments)
        assert (str(main), str(startup)) == before


def test_a_program_is_transpiled_once_and_the_line_is_named() -> None:
    with fresh() as (main, _):
        trained()
        transpile()
        before = str(main)
        with pytest.raises(ValueError, match="transpiled before, as a trainer's") as error:
            transpile()
        assert any("test_transpiler_mistakes.py" in note for note in error.value.__notes__)
        assert str(main) == before


def test_a_program_that_trains_nothing() -> None:
    with fresh():
        fluid.layers.fc(fluid.data("x", [None, 4]), 2)
        with pytest.raises(ValueError, match="updates no parameter"):
            transpile()


@pytest.mark.parametrize(
    "train",
    [
        lambda loss: made.LookaheadOptimizer(made.SGD(0.1)).minimize(loss),
        lambda loss: (made.SGD(0.1).minimize(loss), made.ModelAverage(0.15)),
        lambda loss: (made.SGD(0.1).minimize(loss), made.ExponentialMovingAverage())[1].update(),
    ],
)
def test_averages_that_neither_side_would_keep(train: Callable[[Any], object]) -> None:
    with fresh() as (main, _):
        train(fluid.layers.mean(fluid.layers.fc(fluid.data("x", [None, 4]), 2)))
        before = str(main)
        with pytest.raises(ValueError, match="belongs to no parameter's update"):
            transpile()
        assert str(main) == before


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.get_trainer_program(),
        lambda t: t.get_pserver_program("a:1"),
        lambda t: t.get_startup_program("a:1"),
    ],
)
def test_nothing_was_transpiled(ask: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="no program was transpiled for servers"):
        ask(fluid.DistributeTranspiler())


def test_a_field_that_is_none() -> None:
    config = fluid.DistributeTranspilerConfig()
    with pytest.raises(AttributeError, match="no field 'min_blocksize'") as error:
        config.min_blocksize = 3
    assert any("min_block_size" in note for note in error.value.__notes__)


def test_what_is_no_config() -> None:
    with pytest.raises(TypeError, match="config is of type dict, not DistributeTranspilerConfig"):
        fluid.DistributeTranspiler({})  # type: ignore[arg-type]
    config = fluid.DistributeTranspilerConfig()
    config.min_block_size = 1024
    with pytest.raises(AssertionError, match="min_block_size is 1024"):
        fluid.DistributeTranspiler(config)
    with pytest.raises(TypeError, match="server_config is of type int, not ServerRuntimeConfig"):
        fluid.DistributeTranspiler()._set_server_config(12)  # type: ignore[arg-type]


def test_waiting_for_servers_ends() -> None:
    with pytest.raises(ConnectionError, match=r"servers: nothing listens at 127\.0\.0\.1:1 after"):
        wait_server_ready(["127.0.0.1:1"], deadline_s=0.6)


def test_a_field_of_a_config_that_is_none_names_the_fields_also_for_a_subclass() -> None:
    class Config(fluid.DistributeTranspilerConfig):
        pass

    config = Config()
    config._of_the_script = 1
    with pytest.raises(AttributeError, match="has no field 'slice_up'") as caught:
        config.slice_up = True
    assert "did you mean slice_var_up?" in "".join(caught.value.__notes__)

"""Requests of a script take effect, are rejected, or cause a warning."""

from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import NonFiniteError, StrategyError
from jaxfleet.fluid import layers
from tests.fluid.nets import fresh
from tests.fluid.parallel import Trained, batch, devices, sgd


def test_a_program_finds_the_variables_that_it_shares_in_the_sharers_scope() -> None:
    trained, other = Trained(sgd), Trained(sgd)
    with devices(2):
        train = trained.parallel()
        for step in range(3):
            train.run([], batch(4, step))
        test = other.parallel(main_program=other.test, loss_name=None, share_vars_from=train)
        (found,) = test.run([other.loss.name], batch(4))
        (wanted,) = trained.parallel(main_program=trained.test, loss_name=None).run(
            [trained.loss.name], batch(4)
        )
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("count", [1, 2])
def test_a_compiled_program_that_shares_trains_the_sharers_variables(count: int) -> None:
    trained, other = Trained(sgd), Trained(sgd)
    places = fluid.cpu_places(count)

    def compiled(net: Trained, **options: Any) -> fluid.CompiledProgram:
        made = fluid.CompiledProgram(net.main)
        return made.with_data_parallel(loss_name=net.loss.name, places=places, **options)

    first = compiled(trained)
    trained.exe.run(first, batch(4), scope=trained.scope)
    before, begun = trained.parameters(), other.parameters()
    second = compiled(other, share_vars_from=first)
    other.exe.run(second, batch(4, 1), scope=other.scope)
    assert np.abs(trained.parameters()["w0"] - before["w0"]).max() > 0
    np.testing.assert_array_equal(other.parameters()["w0"], begun["w0"])


def test_a_variable_that_the_sharers_scope_lacks_is_found_in_the_programs_own() -> None:
    trained = Trained(sgd)
    with devices(2):
        train = trained.parallel()
        train.run([], batch(4))
        with fresh() as (main, startup):
            layers.create_global_var([1], 7.0, "float32", persistable=True, name="seven")
        scope = fluid.Scope()
        trained.exe.run(startup, scope=scope)
        with fluid.program_guard(main):
            layers.assign(layers.scale(main.global_block().var("seven"), 2.0))
        test = trained.parallel(
            main_program=main, loss_name=None, share_vars_from=train, scope=scope
        )
        (found,) = test.run([main.global_block().ops[-1].output("Out")[0]], {})
    np.testing.assert_array_equal(found, [14.0, 14.0])


@pytest.mark.parametrize("count", [1, 2])
def test_a_dry_run_changes_nothing_and_fetches_none(count: int) -> None:
    net, strategy = Trained(sgd), fluid.ExecutionStrategy()
    strategy._dry_run = True
    before = net.parameters()
    with devices(count):
        dry = net.parallel(exec_strategy=strategy)
        assert dry.run([net.loss], batch(4)) == [None]
        assert dry.run([]) == []
    for name, value in net.parameters().items():
        np.testing.assert_array_equal(value, before[name])


def test_one_build_strategy_serves_two_parallel_executors() -> None:
    strategy = fluid.BuildStrategy()
    with devices(2):
        for _ in range(2):
            net = Trained(sgd)
            net.parallel(build_strategy=strategy).run([net.loss], batch(4))
    with pytest.raises(ValueError, match="after a program was made"):
        strategy.sync_batch_norm = True


def _logarithm() -> tuple[fluid.Program, fluid.Program, Any]:
    with fresh() as (main, startup):
        x = fluid.data("x", [None, 2])
        loss = layers.mean(layers.log(layers.fc(x, 1, param_attr="w", bias_attr=False)))
        fluid.optimizer.SGD(0.1).minimize(loss)
    return main, startup, loss


@pytest.mark.parametrize("count", [1, 2])
def test_check_nan_inf_names_the_operator_that_made_nan(count: int) -> None:
    main, startup, loss = _logarithm()
    scope, exe = fluid.Scope(), fluid.Executor()
    feed = {"x": np.array([[1, 2], [-1, -2]], np.float32)}
    fluid.set_flags({"FLAGS_check_nan_inf": True})
    try:
        exe.run(startup, scope=scope)
        scope["w"] = np.ones((2, 1), np.float32)
        compiled = fluid.CompiledProgram(main).with_data_parallel(
            loss_name=loss.name, places=fluid.cpu_places(count)
        )
        good = {"x": np.abs(feed["x"])}
        (fine,) = exe.run(compiled, good, [loss], scope=scope)
        assert np.isfinite(fine).all()
        with pytest.raises(NonFiniteError, match="operator 'log' made 1 NaN") as error:
            exe.run(compiled, feed, [], scope=scope)
        assert "test_arguments_act.py" in "".join(error.value.__notes__)
    finally:
        fluid.set_flags({"FLAGS_check_nan_inf": False})
    exe.run(main, feed, [loss], scope=scope)


def test_the_environment_asks_for_the_check_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxfleet.env import read_check_nan_inf  # noqa: PLC0415  # its value is read on import

    monkeypatch.setenv("FLAGS_check_nan_inf", "1")
    assert read_check_nan_inf() is True
    monkeypatch.setenv("FLAGS_check_nan_inf", "perhaps")
    with pytest.raises(StrategyError, match="neither 0 nor 1"):
        read_check_nan_inf()


@pytest.mark.parametrize(("overwrite", "wanted"), [(True, [2, 0, 4]), (False, [3, 0, 4])])
def test_the_gradient_of_a_row_gathered_twice_is_the_last_or_the_sum(
    *, overwrite: bool, wanted: list[float]
) -> None:
    """The numbers are those of 1.8.5."""
    with fresh() as (main, _):
        x, y = fluid.data("x", [3, 1]), fluid.data("y", [4, 1])
        x.stop_gradient = False
        rows = layers.gather(x, fluid.data("i", [4], "int64"), overwrite=overwrite)
        loss = layers.reduce_sum(layers.elementwise_mul(rows, y))
        (grad,) = fluid.gradients([loss], [x])
        y_rows = np.array([[1], [2], [4], [8]], np.float32)
        feed = {"x": np.ones((3, 1), np.float32), "i": np.array([0, 0, 2, -1]), "y": y_rows}
        (found,) = fluid.Executor().run(main, feed, [grad])
    assert found.ravel().tolist() == wanted


def test_reshape_refuses_a_shape_that_is_known_in_a_run_alone() -> None:
    with fresh():
        x = fluid.data("x", [None, 4])
        with pytest.raises(ValueError, match="'actual_shape' is given"):
            layers.reshape(x, [-1, 2], actual_shape=layers.shape(x))


def test_averaging_trainers_cannot_be_asynchronous() -> None:
    with fresh() as (main, _):
        x = fluid.data("x", [None, 2])
        fluid.optimizer.SGD(0.1).minimize(layers.mean(layers.fc(x, 1)))
        transpiler = fluid.transpiler.FLDistributeTranspiler()
        with pytest.raises(StrategyError, match="sync_mode=False: a server averages"):
            transpiler.transpile(0, main, pservers="127.0.0.1:6174", trainers=2, sync_mode=False)


def _summed(strategy: fluid.BuildStrategy, count: int) -> tuple[dict[str, Any], str]:
    net = Trained(sgd)
    with devices(count):
        parallel = net.parallel(build_strategy=strategy)
        for step in range(2):
            parallel.run([], batch(8, step))
    ready = next(iter(parallel._replicas._known.get(net.main).values()))
    return net.parameters(), str(ready.program)


def test_sums_go_in_two_levels_and_several_rings() -> None:
    plain, text = _summed(fluid.BuildStrategy(), 4)
    assert "within" not in text
    strategy = fluid.BuildStrategy()
    strategy.use_hierarchical_allreduce = True
    strategy.hierarchical_allreduce_inter_nranks = 2
    strategy.nccl_comm_num = 2
    levels, text = _summed(strategy, 4)
    assert "within=2" in text
    assert "ring_id=1" in text
    for name, value in plain.items():
        np.testing.assert_allclose(levels[name], value, rtol=1e-6, atol=1e-7)


def test_levels_that_devices_do_not_have_are_warned_of() -> None:
    strategy = fluid.BuildStrategy()
    strategy.use_hierarchical_allreduce = True
    with pytest.warns(UserWarning, match="2 devices do not go in several groups of 2"):
        _summed(strategy, 2)


@pytest.mark.parametrize("name", ["reduce_strategy", "memory_optimize", "is_distribution"])
def test_a_field_without_effect_warns_once(name: str) -> None:
    values = {"reduce_strategy": fluid.BuildStrategy.ReduceStrategy.Reduce}
    strategy = fluid.BuildStrategy()
    with pytest.warns(UserWarning, match=f"BuildStrategy.{name} has no effect here: "):
        setattr(strategy, name, values.get(name, True))
    setattr(strategy, name, values.get(name, True))

"""BuildStrategy and ExecutionStrategy: fluid's fields and defaults, checked, fixed once used."""

from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import FinalError, StrategyError
from tests.fluid.parallel import Trained, batch, devices, sgd


def test_every_field_acts_or_is_named_as_one_that_does_not() -> None:
    assert {"sync_batch_norm", "num_trainers"}.isdisjoint(fluid.BuildStrategy.no_ops())
    assert {"reduce_strategy", "enable_inplace"} <= set(fluid.BuildStrategy.no_ops())
    assert "num_iteration_per_drop_scope" not in fluid.ExecutionStrategy.no_ops()
    assert "num_threads" in fluid.ExecutionStrategy.no_ops()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reduce_strategy", "Sum"),
        ("sync_batch_norm", 1),
        ("num_trainers", 0),
        ("memory_optimize", "yes"),
        ("trainers_endpoints", "127.0.0.1:6174"),
    ],
)
def test_a_value_that_a_field_does_not_take(name: str, value: Any) -> None:
    strategy = fluid.BuildStrategy()
    before = getattr(strategy, name)
    with pytest.raises(StrategyError, match=rf"BuildStrategy\.{name}"):
        setattr(strategy, name, value)
    assert getattr(strategy, name) == before


def test_a_field_that_is_none() -> None:
    strategy = fluid.ExecutionStrategy()
    with pytest.raises(AttributeError, match="has no field 'num_thread'") as caught:
        strategy.num_thread = 4
    assert "did you mean num_threads?" in "".join(caught.value.__notes__)
    with pytest.raises(AttributeError, match="has no field 'threads'"):
        _ = strategy.threads


def test_one_strategys_lists_are_not_anothers() -> None:
    first, second = fluid.BuildStrategy(), fluid.BuildStrategy()
    first.trainers_endpoints.append("127.0.0.1:6174")
    assert second.trainers_endpoints == []


def test_a_strategy_stays_as_it_is_once_a_program_was_made_with_it() -> None:
    net, build, execution = Trained(sgd), fluid.BuildStrategy(), fluid.ExecutionStrategy()
    build.fuse_elewise_add_act_ops = True
    with devices(2):
        net.parallel(build_strategy=build, exec_strategy=execution)
    with pytest.raises(FinalError, match=r"BuildStrategy\.sync_batch_norm is set to True after"):
        build.sync_batch_norm = True
    with pytest.raises(RuntimeError, match=r"ExecutionStrategy\.num_threads"):
        execution.num_threads = 3


def test_several_trainers_scale_the_gradient_and_need_processes(tmp_path: Any) -> None:
    net, build = Trained(sgd), fluid.BuildStrategy()
    build.debug_graphviz_path = str(tmp_path / "program.txt")
    with devices(2):
        parallel = net.parallel(build_strategy=build, num_trainers=2, trainer_id=1)
    assert "{scale=0.25}" in (tmp_path / "program.txt").read_text()
    with pytest.raises(StrategyError, match="2 trainers sum gradients, and this process is by"):
        parallel.run([net.loss], batch(4))
    with devices(2), pytest.raises(StrategyError, match="trainer_id 2 of 2 trainers"):
        net.parallel(num_trainers=2, trainer_id=2)


def test_asynchronous_devices_are_refused() -> None:
    net, build = Trained(sgd), fluid.BuildStrategy()
    build.async_mode = True
    with devices(2), pytest.raises(NotImplementedError, match="async_mode"):
        net.parallel(build_strategy=build)


def test_places_of_two_kinds_and_more_than_there_are() -> None:
    net = Trained(sgd)
    mixed = fluid.CompiledProgram(net.main).with_data_parallel(
        loss_name=net.loss.name, places=[fluid.CPUPlace(), fluid.CUDAPlace(0)]
    )
    with pytest.raises(AssertionError):
        net.exe.run(mixed, batch(4), [net.loss], scope=net.scope)
    with devices(99), pytest.raises(StrategyError, match="99 places on the CPU"):
        net.parallel().run([net.loss], batch(99))


def test_a_gpu_that_is_not_there_is_the_cpu_with_a_warning() -> None:
    net = Trained(sgd)
    with devices(2), pytest.warns(UserWarning, match="a GPU is asked for"):
        parallel = net.parallel(use_cuda=True)
    (loss,) = parallel.run([net.loss], batch(4))
    assert np.isfinite(loss).all()
    with pytest.raises(StrategyError, match="JAX has no GPU here"):
        fluid.cuda_places()
